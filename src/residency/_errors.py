"""The errors of the package, one tree, and its warnings. Each error is the builtin expected, too.

ResidencyError
├── CheckpointError (RuntimeError)      a save or a restore could not be carried out
│   └── CorruptSaveError                bytes on disk are not those that were written
├── HandOffError (RuntimeError)         a device could not be handed over, or taken back
├── InvalidArgumentError (ValueError)   a size, a count or a name that is invalid
├── QueuedWorkError (RuntimeError)      work failed that no call had waited for
├── RefusedError (RuntimeError)         it cannot be done exactly, so nothing was done
└── SimulatorError (RuntimeError)       the simulated accelerator
    ├── BuildError                      it could not be built on this machine
    │   └── NotInstalledError (ModuleNotFoundError)  nor is there anything to build
    └── RaceError                       two operations meet on the same bytes, with no wait
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence

_MOST_LETTERS = 1000
_PACKAGE = __name__.partition(".")[0]
_AROUND_CALLS = ("contextlib", "torch.utils._contextlib")  # whose decorators stand around ours


def in_short(text: str) -> str:
    """Returns a text of which the middle is left out where a file's own words made it long."""
    more = len(text) - _MOST_LETTERS
    if more <= 0:
        return text
    half = _MOST_LETTERS // 2
    return f"{text[:half]} [{more} letters more] {text[-half:]}"


def listed(names: Sequence[str], most: int) -> str:
    """Returns names for a message: so many of them, and how many more there are."""
    more = len(names) - most
    return (", ".join(names[:most]) or "none") + f" and {more} more" * (more > 0)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns, at the line of the program that called into this package."""
    level, frame = 2, sys._getframe(1)
    while _is_inside(str(frame.f_globals.get("__name__"))) and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def _is_inside(module: str) -> bool:
    return module in _AROUND_CALLS or module.partition(".")[0] == _PACKAGE


class ResidencyError(Exception):
    """The root of every error that this package raises on its own account."""


class InvalidArgumentError(ResidencyError, ValueError):
    """An invalid argument: a size that does not parse, an unknown name."""


class HandOffError(ResidencyError, RuntimeError):
    """A device that could not be handed over, or parked bytes that did not fit back.

    Attributes:
        is_parked: Whether objects of this rank are still parked, complete on the host: `retry`, or
            `residency.unpark`, brings them back.
    """

    def __init__(
        self,
        message: str,
        *,
        bring_back: Callable[[], None] | None = None,
        is_parked: bool = False,
    ) -> None:
        super().__init__(message)
        self._bring_back = bring_back
        self.is_parked = is_parked

    def retry(self) -> None:
        """Waits for the bytes once more and brings parked objects back, if there are any.

        With a group, all of its ranks call it, also the ranks that have nothing parked.

        Raises:
            HandOffError: The bytes are still not free; the objects are still complete on the host.
            RefusedError: Another hand-off of the device is under way.
        """
        if self._bring_back is not None:
            self._bring_back()
            self._bring_back = None
            self.is_parked = False


class CheckpointError(ResidencyError, RuntimeError):
    """A save or a restore that could not be carried out."""


class CorruptSaveError(CheckpointError):
    """The bytes on disk have changed since they were written.

    Attributes:
        file: The file, relative to its save's directory.
        tensor: The name of the tensor that the bytes belong to, if it is known.
        offset: The place of the damage in the file, in bytes, if it is known.
    """

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        tensor: str | None = None,
        offset: int | None = None,
    ) -> None:
        super().__init__(in_short(message))
        self.file = file
        self.tensor = tensor
        self.offset = offset


class QueuedWorkError(ResidencyError, RuntimeError):
    """A failure of work that was queued on the device."""


class RefusedError(ResidencyError, RuntimeError):
    """A request that cannot be carried out exactly; all objects stay as they were before."""


class SimulatorError(ResidencyError, RuntimeError):
    """The root of the simulated accelerator's errors."""


class BuildError(SimulatorError):
    """A simulated accelerator that could not be built here; the message says what to install."""


class NotInstalledError(BuildError, ModuleNotFoundError):
    """An import of the simulated accelerator where the distribution with it is not installed."""


class RaceError(SimulatorError):
    """Two operations that meet on the same bytes, one of them writing, with no wait."""
