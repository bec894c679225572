"""One save on its way to the disk, or there: what ``Checkpointer.save`` returns."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import traceback
import weakref
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from residency._checkpoint._once import Once
from residency._nesting import refuse_inside
from residency._system import in_forked_child
from residency._units import format_figures

_MEANINGS = {
    "call_seconds": "for which the call kept its caller",
    "copied_from_device_bytes": "copied from the device beside training",
    "copied_from_host_bytes": "of host tensors, copied in the call",
    "lent_bytes": "lent by an offloaded optimizer, not copied",
    "pinned_bytes": "page-locked, for this and later saves",
    "written_bytes": "written so far",
    "write_seconds": "from the end of the call to publication",
}


@dataclass(frozen=True, slots=True)
class SaveStatistics:
    """The figures of one save.

    Attributes:
        call_seconds: How long ``save`` kept the caller.
        copied_from_device_bytes: Bytes that were copied from the device beside training.
        copied_from_host_bytes: Bytes of host tensors, copied in the call.
        lent_bytes: Bytes that an offloaded optimizer lent, which were not copied.
        pinned_bytes: Page-locked memory that the checkpointer keeps for this and later saves.
        written_bytes: Bytes written so far; of a finished save, the size of its files.
        write_seconds: From the end of the call to publication; None before.
    """

    call_seconds: float
    copied_from_device_bytes: int
    copied_from_host_bytes: int
    lent_bytes: int
    pinned_bytes: int
    written_bytes: int
    write_seconds: float | None

    def __str__(self) -> str:
        return format_figures("a save", self, _MEANINGS)


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """The end of a save: published, skipped, or failed with an error. There is no other.

    Attributes:
        word: Which of them.
        error: Why it failed; None where it did not.
    """

    word: str
    error: BaseException | None = None


PUBLISHED = SaveOutcome("published")
SKIPPED = SaveOutcome("skipped")


def failed(error: BaseException) -> SaveOutcome:
    """Returns the end of a save that is not in the directory, and was to be."""
    return SaveOutcome("failed", error)


class Save:
    """One save; made by ``Checkpointer.save``.

    Attributes:
        step: The training step that it was given.
        path: The directory where it is, once it is published.
    """

    def __init__(self, step: int, path: Path, owner: object = None) -> None:
        self.step = step
        self.path = path
        self._owner = (lambda: None) if owner is None else weakref.ref(owner)
        self._outcome: Once[SaveOutcome] = Once()
        self._num_bytes = 0  # as far as is known when the call is over
        self._written_bytes = 0
        self._figures = SaveStatistics(0.0, 0, 0, 0, 0, 0, None)

    def wait(self) -> Save:
        """Blocks until the save is published; returns it.

        Raises:
            CheckpointError: It could not be written or published; earlier saves are as they were.
            OSError: The system refused a write, for example because the disk is full.
            RefusedError: The save is on its way, and the calling thread is inside of another call
                of the checkpointer, as a signal handler may be: the work that ends the wait may
                itself wait for that call.
        """
        if not self.is_done():
            refuse_inside("wait", self._owner() or self)
            self._outcome.wait()
        error = self._error
        if error is not None:
            with suppress(ValueError):  # another thread has raised it, or a save's call
                unreported.remove(self)
            raise error
        return self

    def is_done(self) -> bool:
        """Returns whether the save is published, or has failed, or was skipped."""
        return self._outcome.value is not None

    @property
    def is_skipped(self) -> bool:
        """Whether it was not carried out, because others were still being written."""
        return self._outcome.value is SKIPPED

    @property
    def _error(self) -> BaseException | None:
        """Why it failed; None before, and where it did not."""
        outcome = self._outcome.value
        return None if outcome is None else outcome.error

    def statistics(self) -> SaveStatistics:
        """Returns the figures of this save so far."""
        return replace(self._figures, written_bytes=self._written_bytes)

    def __repr__(self) -> str:
        outcome = self._outcome.value
        state = "on its way" if outcome is None else outcome.word
        if outcome is not None and outcome.error is not None:
            state = f"{state}: {outcome.error}"
        return f"<Save of step {self.step} at {str(self.path)!r}, {state}>"


def let_locals_go(error: BaseException) -> None:
    """Lets the frames that an error remembers go of what they held, which is most of a state."""
    found: BaseException | None = error
    while found is not None:
        traceback.clear_frames(found.__traceback__)
        found = found.__cause__ or found.__context__


unreported: list[Save] = []  # those that failed, which no call has raised


def raise_unreported(folder: Path) -> None:
    """Raises the first failure of a save into a directory that no call has raised yet."""
    mine = [save for save in unreported if save.path.parent == folder]
    if not mine:
        return
    error = mine[0]._error
    assert error is not None
    for save in mine[1:]:
        error.add_note(f"The save of step {save.step} failed, too: {save._error}")
    unreported[:] = [save for save in unreported if save not in mine]
    try:
        raise error
    finally:
        del error, mine  # an error that this frame keeps would keep the frame


def nobody_tells() -> bool:
    """Returns whether the process has reported failures for the last time, and is ending."""
    return _exit.has_told


class _Exit:
    """The last words of the process."""

    has_told = False


_exit = _Exit()


def _tell_at_exit() -> None:
    """Ends the process with an error when a save failed and no call raised that."""
    _exit.has_told = True
    if not unreported:
        return
    for save in unreported:
        print(f"residency: the save of step {save.step} at {save.path} failed:", file=sys.stderr)
        traceback.print_exception(save._error)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)  # an exception would be printed, and the status stay 0


atexit.register(_tell_at_exit)
in_forked_child(unreported.clear)  # they are the parent's to tell
