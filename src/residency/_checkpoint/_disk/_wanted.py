"""Ranges that a caller wants of files, and the tasks that read them, one for each chunk."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from residency._errors import CorruptSaveError
from residency._units import parse_bytes

_UNCHECKED_CHUNK_BYTES = parse_bytes("8MiB")  # of a file without chunks: two calls for a task


@dataclass(frozen=True, slots=True, eq=False)
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
    """A range of a file in which every byte is wanted by the same ranges."""

    start: int
    stop: int
    wanted: tuple[Wanted, ...] = ()


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
            is_inside = (start, stop) == (span.start, span.stop)
            task.spans.append(span if is_inside else FileRange(start, stop, span.wanted))
    for index in sorted(by_chunk):
        task = by_chunk[index]
        if sums is not None:
            task.crc32 = sums.crc32[index]
            _fill_gaps(task.spans, index * grid, min((index + 1) * grid, sums.num_bytes))
        yield task


def _spans(wanted: Sequence[Wanted]) -> Iterator[FileRange]:
    left = sorted(wanted, key=lambda w: w.start, reverse=True)
    cuts = sorted({edge for w in wanted for edge in (w.start, w.stop)})
    active: list[Wanted] = []
    for start, stop in pairwise(cuts):
        active = [w for w in active if w.stop > start]
        while left and left[-1].start == start:
            active.append(left.pop())
        if active:
            yield FileRange(start, stop, tuple(active))


def _fill_gaps(spans: list[FileRange], first: int, last: int) -> None:
    edges = [first, *(edge for span in spans for edge in (span.start, span.stop)), last]
    gaps = [
        FileRange(start, stop)
        for start, stop in zip(edges[::2], edges[1::2], strict=True)
        if start < stop
    ]
    spans += gaps
    spans.sort(key=lambda span: span.start)


def name_of(file: FileReads) -> str:
    """Returns a file's name as errors give it: without its folder."""
    return os.path.basename(file.path)
