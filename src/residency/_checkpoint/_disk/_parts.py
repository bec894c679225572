"""The parts of a save: whose bytes they are, and when they may be had and must be given back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from residency._checkpoint._disk._manifest import Record
from residency._errors import CheckpointError


class Stores(Protocol):
    """An object that has one tensor's bytes for a save."""

    @property
    def record(self) -> Record:
        """What is stored."""
        ...

    def acquire(self) -> memoryview:
        """Returns the bytes, contiguous, and blocks until they are final.

        It is called at most once (not for a tensor without bytes, nor after a failure), from any
        thread. Memory that is writable and begins at a page, or where else the file system takes
        it, goes to the disk without a copy.
        """
        ...

    def check(self) -> None:
        """Comes once all bytes were written, before ``release``; raises where they changed
        meanwhile, and the save fails.
        """

    def release(self) -> None:
        """Comes exactly once, from any thread: the bytes were written, or the save failed. It
        must not raise.
        """


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor's bytes for a save, from functions; see ``Stores``."""

    record: Record
    acquire: Callable[[], memoryview]
    release: Callable[[], None]

    def check(self) -> None:
        """Does nothing: these bytes are not lent."""


@dataclass(frozen=True, slots=True)
class FilePlan:
    """A file and the parts that go into it."""

    name: str
    parts: Sequence[Stores]


_ALONE = nullcontext()


class Lease:
    """A part that is acquired and released once, whichever thread comes first.

    Args:
        part: What it is.
        counting: A lock that no thread holds for long; the leases of a save have one together.
    """

    def __init__(self, part: Stores, counting: threading.Lock) -> None:
        self.record = part.record
        self._part = part
        self._view: memoryview | None = None
        self._error: BaseException | None = None
        self._is_released = False
        self._num_pending = 0
        self._counting = counting
        # Of a part that lies in one chunk, one thread alone asks for the bytes.
        self._acquiring: threading.Lock | nullcontext[None] = _ALONE

    def expect(self, num_chunks: int) -> None:
        """Says how many chunks the part's bytes lie in."""
        self._num_pending = num_chunks
        if num_chunks > 1:
            self._acquiring = threading.Lock()

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
            view = self._part.acquire()
            if view.format != "B" or view.ndim != 1:
                view = view.cast("B")
        except Exception as error:
            raise CheckpointError(
                f"reading the bytes of {record.name!r} failed: {error}"
            ) from error
        if view.nbytes != record.num_bytes:
            raise CheckpointError(
                f"{record.name!r} came with {view.nbytes} bytes, expected {record.num_bytes}."
            )
        return view

    def written(self) -> None:
        """Counts one chunk's share of the bytes as written; releases after the last.

        Raises:
            CheckpointError: The bytes changed meanwhile.
        """
        with self._counting:
            self._num_pending -= 1
            is_last = self._num_pending == 0
        if is_last:
            self._part.check()
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
    counting = threading.Lock()
    files = [(plan.name, [Lease(part, counting) for part in plan.parts]) for plan in plans]
    try:
        yield files
    finally:
        for _, leases in files:
            for lease in leases:
                lease.release()
