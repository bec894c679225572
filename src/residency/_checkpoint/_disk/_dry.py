"""The saves of a dry run: the bytes of large tensors mean nothing there, so that they are
holes of the files, which read as zeros and take no room; and of many ranks there is only the first.

Such a save is whole for every reader: its checksums are those of the bytes that the files have.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from residency._checkpoint._disk._crc import crc32
from residency._checkpoint._disk._descriptor import Descriptor
from residency._units import MIB

MOST_KNOWN_BYTES = 4 * MIB
"""Up to here the simulator knows what was copied to the device, so that such a hole is read."""

_LARGE = MIB  # below it are counters, flags and the like, which may steer a script
_zeros = memoryview(bytes(4 * MIB))  # of a chunk
_dry: list[bool] = []
_observers: list[Callable[[Path], None]] = []


def be_dry(is_on: bool = True) -> None:
    """Sets whether this process's saves are those of a dry run."""
    _dry[:] = [True] * is_on


def is_dry() -> bool:
    """Returns whether this process's saves are those of a dry run."""
    return bool(_dry)


def watch_files(on_file: Callable[[Path], None]) -> None:
    """Registers a function that is called with each file of a save that is on the disk."""
    _observers.append(on_file)


def note_file(path: Path) -> None:
    """Tells the observers of a file that is on the disk."""
    for observer in _observers:
        observer(path)


def is_left_out(num_bytes: int) -> bool:
    """Returns whether a tensor of this size is a hole."""
    return is_dry() and num_bytes >= _LARGE


def hole(num_bytes: int) -> memoryview:
    """Returns the bytes of a hole, of at most a chunk."""
    return _zeros[:num_bytes]


def is_hole(buffer: memoryview) -> bool:
    """Returns whether these are the bytes of a hole."""
    return buffer.obj is _zeros.obj


@lru_cache(maxsize=256)
def crc32_of_hole(num_bytes: int, before: int = 0) -> int:
    """Returns the checksum that a hole, of at most a chunk, makes of that of the bytes before."""
    return int(crc32(hole(num_bytes), before))


def around_holes(
    buffers: Sequence[memoryview], offset: int
) -> Iterator[tuple[int, list[memoryview]]]:
    """Yields what there is to write: where it goes, and the bytes that lie one behind the other."""
    run: list[memoryview] = []
    first = offset
    for buffer in buffers:
        if is_hole(buffer):
            if run:
                yield first, run
            run, first = [], offset + buffer.nbytes
        else:
            run.append(buffer)
        offset += buffer.nbytes
    if run:
        yield first, run


def lies_in_hole(fd: Descriptor, offset: int, num_bytes: int) -> bool:
    """Returns whether all of these bytes of a file are a hole's."""
    try:
        return os.lseek(fd.fileno(), offset, os.SEEK_DATA) >= offset + num_bytes
    except OSError as error:
        # No byte follows but those of a hole; every other error is of a system that knows none.
        is_last = error.errno == errno.ENXIO
        return is_last and offset + num_bytes <= os.fstat(fd.fileno()).st_size
