"""One save on its way to the disk, or there: what ``Checkpointer.save`` returns."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

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


class Save:
    """One save; made by ``Checkpointer.save``.

    Attributes:
        step: The training step that it was given.
        path: The directory where it is, once it is published.
        is_skipped: Whether it was not carried out, because others were still being written.
    """

    def __init__(self, step: int, path: Path, *, is_skipped: bool = False) -> None:
        self.step = step
        self.path = path
        self.is_skipped = is_skipped
        self._done = threading.Event()
        if is_skipped:
            self._done.set()
        self._error: BaseException | None = None
        self._num_bytes = 0  # as far as is known when the call is over
        self._written_bytes = 0
        self._figures = SaveStatistics(0.0, 0, 0, 0, 0, 0, None)

    def wait(self) -> Save:
        """Blocks until the save is published; returns it.

        Raises:
            CheckpointError: It could not be written or published; earlier saves are as they were.
            OSError: The system refused, such as a disk without room.
        """
        self._done.wait()
        if self._error is not None:
            with suppress(ValueError):  # another thread has raised it, or a save's call
                unreported.remove(self)
            raise self._error
        return self

    def is_done(self) -> bool:
        """Returns whether the save is published, or has failed, or was skipped."""
        return self._done.is_set()

    def statistics(self) -> SaveStatistics:
        """Returns the figures of this save so far."""
        return replace(self._figures, written_bytes=self._written_bytes)

    def __repr__(self) -> str:
        if self.is_skipped:
            state = "skipped"
        elif not self.is_done():
            state = "on its way"
        else:
            state = "published" if self._error is None else f"failed: {self._error}"
        return f"<Save of step {self.step} at {str(self.path)!r}, {state}>"


def let_locals_go(error: BaseException) -> None:
    """Lets the frames that an error remembers go of what they held, which is most of a state."""
    found: BaseException | None = error
    while found is not None:
        traceback.clear_frames(found.__traceback__)
        found = found.__cause__ or found.__context__


unreported: list[Save] = []  # those that failed, which no call has raised


def _tell_at_exit() -> None:
    """Ends the process with an error when a save failed and no call raised that."""
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
os.register_at_fork(after_in_child=unreported.clear)  # they are the parent's to tell
