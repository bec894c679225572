"""Ranges that a caller wants of files, and the tasks that read them, one for each chunk."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import Any

from residency._errors import CorruptSaveError
from residency._units import parse_bytes

_BRIDGED_BYTES = parse_bytes("64KiB")  # a gap that is cheaper to read than to skip
_UNCHECKED_CHUNK_BYTES = parse_bytes("8MiB")  # of a file without chunks: two calls for a task


@dataclass(slots=True, eq=False)
class Wanted:
    """A range of a file, and where its bytes go.

    Attributes:
        start: Its first byte in the file.
        num_bytes: How many are wanted, at least one.
        tensor: Whose they are; errors name it.
        target: Writable host memory of that size; None sends the bytes through the ring.
        destination: The caller's, who finds it again in an ``Arrival``.
    """

    start: int
    num_bytes: int
    tensor: str
    target: memoryview | None = None
    destination: Any = None

    @property
    def stop(self) -> int:
        return self.start + self.num_bytes


@dataclass(frozen=True, slots=True)
class Checksums:
    """The crc32 of a file's chunks, cut at multiples of ``chunk_bytes``."""

    num_bytes: int
    chunk_bytes: int
    crc32: Sequence[int]


@dataclass(frozen=True, slots=True)
class FileReads:
    """The ranges that are wanted of one file.

    Attributes:
        path: The file.
        wanted: The ranges, in any order; they may overlap.
        checksums: What its bytes were, where that is known.
    """

    path: str | os.PathLike[str]
    wanted: Sequence[Wanted]
    checksums: Checksums | None = None


@dataclass(slots=True, eq=False)
class FileRange:
    """A range of a file in which every byte is wanted by the same ranges.

    Attributes:
        is_staged: Whether one of them has no target, so that the bytes go through the ring.
    """

    start: int
    stop: int
    wanted: Sequence[Wanted] = ()
    is_staged: bool = False


@dataclass(slots=True, eq=False)
class Task:
    """One chunk of a file, or as much of one as is wanted."""

    file: FileReads
    spans: list[FileRange] = field(default_factory=list)
    crc32: int | None = None


def tasks_of(file: FileReads) -> Iterator[Task]:
    """Yields what is to be read of a file.

    Raises:
        CorruptSaveError: The file ends before what is wanted, by its checksums.
    """
    sums = file.checksums
    grid = _UNCHECKED_CHUNK_BYTES if sums is None else sums.chunk_bytes
    by_chunk: dict[int, Task] = {}
    for span in _spans(file.wanted):
        if sums is not None and span.stop > sums.num_bytes:
            raise CorruptSaveError(
                f"{name_of(file)} has {sums.num_bytes} bytes, and {span.wanted[0].tensor} would "
                f"end at {span.stop}.",
                file=name_of(file),
                tensor=span.wanted[0].tensor,
                offset=sums.num_bytes,
            )
        for index in range(span.start // grid, (span.stop - 1) // grid + 1):
            start, stop = max(span.start, index * grid), min(span.stop, (index + 1) * grid)
            task = by_chunk.get(index)
            if task is None:
                task = by_chunk[index] = Task(file)
            is_inside = start == span.start and stop == span.stop
            piece = span if is_inside else FileRange(start, stop, span.wanted, span.is_staged)
            task.spans.append(piece)
    for index in sorted(by_chunk):
        task = by_chunk[index]
        if sums is None:
            first, last = task.spans[0].start, task.spans[-1].stop
            task.spans = _with_gaps(task.spans, first, last, _BRIDGED_BYTES)
        else:
            task.crc32 = sums.crc32[index]
            last = min((index + 1) * grid, sums.num_bytes)
            task.spans = _with_gaps(task.spans, index * grid, last, grid)
        yield task


def _spans(wanted: Sequence[Wanted]) -> list[FileRange]:
    spans: list[FileRange] = []
    left = deque(sorted(wanted, key=attrgetter("start")))
    while left:
        near = [left.popleft()]
        reach = near[0].stop
        while left and left[0].start < reach:
            near.append(left.popleft())
            reach = max(reach, near[-1].stop)
        if len(near) == 1:  # as nearly always
            spans.append(FileRange(near[0].start, reach, near, near[0].target is None))
        else:
            spans += _cut(near)
    return spans


def _cut(near: Sequence[Wanted]) -> Iterator[FileRange]:
    """Cuts ranges that overlap where one of them begins or ends."""
    for start, stop in pairwise(sorted({edge for w in near for edge in (w.start, w.stop)})):
        here = [w for w in near if w.start <= start and w.stop >= stop]
        yield FileRange(start, stop, here, any(w.target is None for w in here))


def _with_gaps(
    spans: Sequence[FileRange], first: int, last: int, most_bytes: int
) -> list[FileRange]:
    """Returns the spans from one byte of a file to another with what no one wants between them,
    where that is short enough to be read along.
    """
    filled: list[FileRange] = []
    for span in spans:
        if 0 < span.start - first <= most_bytes:
            filled.append(FileRange(first, span.start))
        filled.append(span)
        first = span.stop
    if first < last:
        filled.append(FileRange(first, last))
    return filled


def name_of(file: FileReads) -> str:
    """Returns a file's name as errors give it: without its folder."""
    return os.path.basename(file.path)
