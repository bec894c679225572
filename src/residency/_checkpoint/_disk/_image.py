"""The bytes of one chunk of a file: what is summed is what is handed to the system."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from residency._checkpoint._disk._header import ALIGNMENT
from residency._checkpoint._disk._system import System

_MAX_BUFFERS = 64  # of one call; far below what any system allows
_MIN_FOREIGN_COPY_BYTES = 65536  # a shorter copy is quicker than letting other threads run


class Image:
    """The bytes of one chunk, as they are summed and as they are handed to the system.

    Args:
        views: The bytes, one behind the other; at least one is.
        bounce: The thread's own buffer, of one chunk and a page more.
        alignment: What a direct write asks of memory; None for a write through the page cache.
        copy: Whether the views go through the buffer though they lie as they should.

    Attributes:
        is_copy: Whether they do.
    """

    def __init__(
        self,
        views: Sequence[memoryview],
        bounce: memoryview,
        alignment: int | None,
        *,
        copy: bool,
    ) -> None:
        self.num_bytes = sum(view.nbytes for view in views)
        self._padding = 0 if alignment is None else -self.num_bytes % ALIGNMENT
        is_fit = len(views) <= _MAX_BUFFERS and self._padding == 0 and not copy
        self.is_copy = not is_fit or not (
            alignment is None or all(_is_aligned(each, alignment) for each in views)
        )
        self._buffers = [_gather(views, bounce, self._padding)] if self.is_copy else list(views)

    def crc32(self, system: System) -> int:
        """Returns the checksum of the chunk, without its padding."""
        summed = 0
        for buffer in self.buffers(padded=False):
            summed = system.crc32(buffer, summed)
        return summed

    def buffers(self, *, padded: bool) -> list[memoryview]:
        """Returns the bytes, with zeros up to the end of a page where it is padded."""
        if padded or not self._padding:
            return list(self._buffers)
        (gathered,) = self._buffers  # what has padding is in one piece
        return [gathered[: self.num_bytes]]

    def let_go(self) -> None:
        """Drops all views of the parts' memory."""
        self._buffers.clear()


def _gather(buffers: Sequence[memoryview], bounce: memoryview, num_zeros: int) -> memoryview:
    """Copies buffers one behind the other, puts zeros behind, and returns where all this lies."""
    start = 0
    for buffer in buffers:
        stop = start + buffer.nbytes
        if buffer.nbytes < _MIN_FOREIGN_COPY_BYTES or buffer.readonly:
            bounce[start:stop] = buffer
        else:
            # A copy of megabytes, in which the training thread can run.
            ctypes.memmove(_address(bounce[start:stop]), _address(buffer), buffer.nbytes)
        start = stop
    bounce[start : start + num_zeros] = bytes(num_zeros)
    return bounce[: start + num_zeros]


def _is_aligned(buffer: memoryview, alignment: int) -> bool:
    # The address of memory that is read-only cannot be had without looking behind Python's back.
    if buffer.readonly or buffer.nbytes % alignment:
        return False
    return _address(buffer) % alignment == 0


def _address(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
