"""The parts of a save: whose bytes they are, and when they may be had and must be given back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from residency._checkpoint._disk._manifest import Record
from residency._errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Part:
    """Holds one tensor's bytes for a save.

    Attributes:
        record: What is stored.
        acquire: Returns the bytes, contiguous, and blocks until they are final. It is called at
            most once (not for a tensor without bytes, nor after a failure), from any thread. Memory
            that is writable and begins at a page, or where else the file system takes it, goes to
            the disk without a copy.
        release: Is called exactly once, from any thread: the bytes were written, or the save
            failed. It must not raise.
    """

    record: Record
    acquire: Callable[[], memoryview]
    release: Callable[[], None]


@dataclass(frozen=True, slots=True)
class FilePlan:
    """Names a file and the parts that go into it."""

    name: str
    parts: Sequence[Part]


class Lease:
    """Acquires and releases a part once, whichever thread comes first."""

    def __init__(self, part: Part) -> None:
        self.record = part.record
        self._part = part
        self._view: memoryview | None = None
        self._error: BaseException | None = None
        self._is_released = False
        self._num_pending = 0
        self._acquiring = threading.Lock()
        self._counting = threading.Lock()

    def expect(self, num_chunks: int) -> None:
        """Says how many chunks the part's bytes lie in."""
        self._num_pending = num_chunks

    def view(self) -> memoryview:
        """Returns the part's bytes; a second thread waits here for the first one's answer."""
        with self._acquiring:
            if self._error is not None:
                raise self._error
            if self._view is None:
                try:
                    self._view = self._acquire()
                except BaseException as error:
                    self._error = error
                    raise
            return self._view

    def _acquire(self) -> memoryview:
        record = self.record
        try:
            view = memoryview(self._part.acquire()).cast("B")
        except Exception as error:
            raise CheckpointError(
                f"the bytes of {record.name!r} could not be had: {error}"
            ) from error
        if view.nbytes != record.num_bytes:
            raise CheckpointError(
                f"{record.name!r} came with {view.nbytes} bytes, expected {record.num_bytes}."
            )
        return view

    def written(self) -> None:
        """Says that one chunk's share of the bytes is written; releases after the last."""
        with self._counting:
            self._num_pending -= 1
            is_last = self._num_pending == 0
        if is_last:
            self.release()

    def release(self) -> None:
        """Gives the part back, if it was not given back before."""
        with self._counting:
            if self._is_released:
                return
            self._is_released = True
        self._view = None
        self._part.release()


@contextmanager
def leased(plans: Sequence[FilePlan]) -> Iterator[list[tuple[str, list[Lease]]]]:
    """Yields each plan's name and leases; at the end every part is released, whatever happened."""
    files = [(plan.name, [Lease(part) for part in plan.parts]) for plan in plans]
    try:
        yield files
    finally:
        for _, leases in files:
            for lease in leases:
                lease.release()
