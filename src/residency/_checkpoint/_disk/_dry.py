"""The saves of a dry run: the bytes of large tensors mean nothing there, so that they are
holes of the files, which read as zeros and take no room; and of many ranks there is only the first.

Such a save is whole for every reader: its checksums are those of the bytes that the files have.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path

from residency._checkpoint._disk._crc import crc32
from residency._checkpoint._disk._descriptor import Descriptor
from residency._checkpoint._disk._system import O_DIRECT, System, use_system
from residency._units import MIB

_MOST_KNOWN_BYTES = 4 * MIB  # the simulator knows what was copied to the device: that hole is read
_LARGE = MIB  # below it are counters, flags and the like, which may steer a script
_zeros = memoryview(bytes(4 * MIB))  # of a chunk
_observers: list[Callable[[Path], None]] = []


class DrySystem(System):
    """The system calls of a dry run's saves: large tensors are neither written nor read."""

    is_alone = True

    def open(self, path: str | os.PathLike[str], flags: int) -> Descriptor:
        """Opens a file, which has no direct writes: holes are left out between others."""
        if flags & O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().open(path, flags)

    def fallocate(self, fd: Descriptor, num_bytes: int) -> None:
        """Makes a file as long, without blocks."""
        self.ftruncate(fd, num_bytes)

    def room_bytes(self, path: Path) -> int:
        """Returns that there is room for everything, which takes none."""
        super().room_bytes(path)
        return sys.maxsize

    def pwritev(self, fd: Descriptor, buffers: Sequence[memoryview], offset: int) -> int:
        """Writes what is no hole."""
        return self._around_holes(super().pwritev, fd, buffers, offset)

    def preadv(self, fd: Descriptor, buffers: Sequence[memoryview], offset: int) -> int:
        """Reads what is no hole."""
        return self._around_holes(super().preadv, fd, buffers, offset)

    def _around_holes(
        self,
        move: Callable[[Descriptor, Sequence[memoryview], int], int],
        fd: Descriptor,
        buffers: Sequence[memoryview],
        offset: int,
    ) -> int:
        done = 0
        for is_hole, group in groupby(buffers, _is_hole):
            run = list(group)
            num_bytes = sum(buffer.nbytes for buffer in run)
            count = num_bytes if is_hole else move(fd, run, offset + done)
            done += count
            if count < num_bytes:
                break
        return done

    def crc32(self, buffer: memoryview, before: int = 0) -> int:
        """Returns a checksum; those of holes are known."""
        return _crc32_of_hole(buffer.nbytes, before) if _is_hole(buffer) else crc32(buffer, before)

    def source(self, view: memoryview, tensor_bytes: int) -> memoryview:
        """Returns a hole in the place of a large tensor's bytes."""
        return _zeros[: view.nbytes] if tensor_bytes >= _LARGE else view

    def target(
        self, view: memoryview, path: str | os.PathLike[str], offset: int, sizes: Iterable[int]
    ) -> memoryview:
        """Returns a hole in the place of a large tensor's memory, if the file has one there."""
        is_known = any(size <= _MOST_KNOWN_BYTES for size in sizes)
        is_hole = not is_known and _lies_in_hole(path, offset, view.nbytes)
        return _zeros[: view.nbytes] if is_hole else view


def be_dry(is_on: bool = True) -> None:
    """Sets whether this process's saves are those of a dry run."""
    use_system(DrySystem() if is_on else None)


def watch_files(on_file: Callable[[Path], None]) -> None:
    """Registers a function that is called with each file of a save that is on the disk."""
    _observers.append(on_file)


def note_file(path: Path) -> None:
    """Tells the observers of a file that is on the disk."""
    for observer in _observers:
        observer(path)


def _is_hole(buffer: memoryview) -> bool:
    return buffer.obj is _zeros.obj


@lru_cache(maxsize=256)
def _crc32_of_hole(num_bytes: int, before: int) -> int:
    return crc32(_zeros[:num_bytes], before)


def _lies_in_hole(path: str | os.PathLike[str], offset: int, num_bytes: int) -> bool:
    """Returns whether all of these bytes of a file are a hole's."""
    try:
        fd = Descriptor(path, os.O_RDONLY)
        return os.lseek(fd.fileno(), offset, os.SEEK_DATA) >= offset + num_bytes
    except OSError as error:
        # No byte follows but those of a hole; every other error is of a system that knows none,
        # or of a file that reading will name.
        return error.errno == errno.ENXIO and offset + num_bytes <= os.stat(path).st_size
