"""Reads wanted ranges of files into host memory, checking every chunk that it touches.

Bytes go by ``os.preadv`` straight to where they are wanted, or into a slot of a ring from which the
caller carries them on. Where checksums are known, a file is read in whole chunks, and what is not
wanted of a chunk goes to a scratch buffer. Invariant, which
``tests/checkpoint/restore/test_read.py`` tries to break: a read that ends without an error has
handed on the bytes that were written, as the checksum of each chunk says; beside its targets it has
taken the ring, and ``SCRATCH_BYTES`` of host memory for each thread.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from residency._checkpoint._disk._crc import crc32
from residency._checkpoint._disk._descriptor import Descriptor
from residency._checkpoint._disk._dry import (
    MOST_KNOWN_BYTES,
    crc32_of_hole,
    is_dry,
    lies_in_hole,
)
from residency._checkpoint._disk._naming import unreadable
from residency._checkpoint._disk._ring import Ring, Slot
from residency._errors import CorruptSaveError, InvalidArgumentError, listed
from residency._registries import WeakRegistry
from residency._units import parse_bytes

SCRATCH_BYTES = parse_bytes("256KiB")  # for gaps that are read along; holds several of them
_UNCHECKED_CHUNK_BYTES = parse_bytes("8MiB")  # of a file without chunks: two calls for a task
_CALL_BYTES = parse_bytes("4MiB")  # at the most what is handed on at once
# Small enough that the checksum finds the bytes in the cache, large enough for a system call.
_STEP_BYTES = parse_bytes("256KiB")
_BRIDGED_BYTES = parse_bytes("64KiB")  # a gap that is cheaper to read than to skip
_MOST_BUFFERS = 512  # Linux takes 1024 in a call
_NUM_THREADS = 2  # one reads while the other sums


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


class FilledSlot(NamedTuple):
    """The news that bytes of a range without a target are in a slot.

    Attributes:
        wanted: The range.
        first: Which of its bytes the first one is.
        slot_offset: Where in the slot they begin.
        num_bytes: How many they are.
    """

    wanted: Wanted
    first: int
    slot_offset: int
    num_bytes: int


Consumer = Callable[[Slot, Sequence[FilledSlot]], None]


def read_files(
    files: Sequence[FileReads],
    *,
    ring: Ring | None = None,
    consume: Consumer | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Reads what is wanted of some files.

    Args:
        files: What is wanted.
        ring: For ranges without a target.
        consume: Called in this thread with each slot that was filled; it gives the slot back.
        on_bytes: Called in this thread with the bytes that a chunk brought.

    Raises:
        CorruptSaveError: A chunk is not what was written, or a file ends too early. Bytes that
            were read before have been handed on.
        CheckpointError: A file cannot be read.

    Memory:
        The ring, and ``SCRATCH_BYTES`` for each of two threads.
    """
    if ring is None and any(w.target is None for file in files for w in file.wanted):
        raise InvalidArgumentError("a range has no target, and there is no ring to read it into.")
    for left in _pools:  # an interrupt came before its end
        if left.caller == threading.get_ident():
            left.stop()
    tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
    num_tasks = 0
    for file in files:
        for task in _tasks_of(file):
            tasks.put(task)
            num_tasks += 1
    if num_tasks:
        _Pool(tasks, num_tasks, ring).run(consume, on_bytes)


@dataclass(slots=True, eq=False)
class _FileRange:
    """A range of a file in which every byte is wanted by the same ranges."""

    start: int
    stop: int
    wanted: tuple[Wanted, ...] = ()


@dataclass(slots=True, eq=False)
class _Task:
    """One chunk of a file, or as much of one as is wanted."""

    file: FileReads
    spans: list[_FileRange] = field(default_factory=list)
    crc32: int | None = None


def _tasks_of(file: FileReads) -> Iterator[_Task]:
    sums = file.checksums
    grid = _UNCHECKED_CHUNK_BYTES if sums is None else sums.chunk_bytes
    by_chunk: dict[int, _Task] = {}
    for span in _spans(file.wanted):
        if sums is not None and span.stop > sums.num_bytes:
            raise CorruptSaveError(
                f"{_name(file)} has {sums.num_bytes} bytes, and {span.wanted[0].tensor} would end "
                f"at {span.stop}.",
                file=_name(file),
                tensor=span.wanted[0].tensor,
                offset=sums.num_bytes,
            )
        for index in range(span.start // grid, (span.stop - 1) // grid + 1):
            start, stop = max(span.start, index * grid), min(span.stop, (index + 1) * grid)
            task = by_chunk.get(index)
            if task is None:
                task = by_chunk[index] = _Task(file)
            is_inside = (start, stop) == (span.start, span.stop)
            task.spans.append(span if is_inside else _FileRange(start, stop, span.wanted))
    for index in sorted(by_chunk):
        task = by_chunk[index]
        if sums is not None:
            task.crc32 = sums.crc32[index]
            _fill_gaps(task.spans, index * grid, min((index + 1) * grid, sums.num_bytes))
        yield task


def _spans(wanted: Sequence[Wanted]) -> Iterator[_FileRange]:
    left = sorted(wanted, key=lambda w: w.start, reverse=True)
    cuts = sorted({edge for w in wanted for edge in (w.start, w.stop)})
    active: list[Wanted] = []
    for start, stop in pairwise(cuts):
        active = [w for w in active if w.stop > start]
        while left and left[-1].start == start:
            active.append(left.pop())
        if active:
            yield _FileRange(start, stop, tuple(active))


def _fill_gaps(spans: list[_FileRange], first: int, last: int) -> None:
    edges = [first, *(edge for span in spans for edge in (span.start, span.stop)), last]
    gaps = [
        _FileRange(start, stop)
        for start, stop in zip(edges[::2], edges[1::2], strict=True)
        if start < stop
    ]
    spans += gaps
    spans.sort(key=lambda span: span.start)


def _name(file: FileReads) -> str:
    return os.path.basename(file.path)


class _Filled(NamedTuple):
    slot: Slot
    arrivals: list[FilledSlot]


class _Pool:
    """The threads that run the tasks, and hand what they filled to the calling thread.

    Invariant, which ``tests/checkpoint/restore/test_read.py`` tries to break: once ``stop`` is over
    no thread writes into a target, whatever interrupted the caller: one that has begun is joined,
    one that begins later finds that it is to stop.
    """

    def __init__(self, tasks: queue.SimpleQueue[_Task], num_tasks: int, ring: Ring | None) -> None:
        self._tasks = tasks
        self._ring = ring
        self._done: queue.SimpleQueue[_Filled | int | BaseException | None] = queue.SimpleQueue()
        self._is_stopped = False
        self._threads = [
            threading.Thread(target=self._work, name=f"residency-read-{index}", daemon=True)
            for index in range(min(_NUM_THREADS, num_tasks))
        ]
        self._num_left = len(self._threads)
        self.caller = threading.get_ident()
        _pools.add(self)

    def run(self, consume: Consumer | None, on_bytes: Callable[[int], None] | None) -> None:
        message = None
        try:
            for thread in self._threads:
                thread.start()
            while self._num_left:
                message = self._done.get()
                if message is None:
                    self._num_left -= 1
                elif isinstance(message, BaseException):
                    raise message
                elif isinstance(message, int):
                    if on_bytes is not None:
                        on_bytes(message)
                elif consume is not None:
                    consume(message.slot, message.arrivals)
        finally:
            message = None  # an error that this frame keeps would keep the frame
            self.stop()

    def stop(self) -> None:
        """Ends the reading; an interrupt that comes meanwhile is raised when that is done."""
        self._is_stopped = True
        interrupt: BaseException | None = None
        is_over = False
        while not is_over:
            try:
                if self._num_left and self._ring is not None:
                    self._ring.close()
                for thread in self._threads:
                    with suppress(RuntimeError):  # it has not begun
                        thread.join()
                is_over = True
            except BaseException as error:
                interrupt = error
        _pools.discard(self)
        if interrupt is not None:
            raise interrupt

    def _work(self) -> None:
        reader = _ChunkReader(self._ring, self._done.put)
        try:
            while not self._is_stopped:
                try:
                    task = self._tasks.get_nowait()
                except queue.Empty:
                    break
                if not reader.read(task):
                    break
                self._done.put(task.spans[-1].stop - task.spans[0].start)
            self._done.put(None)
        except BaseException as error:  # raised again in the calling thread
            self._done.put(error)
        finally:
            reader.close()


# Those that have not stopped: one for each thread that reads, unless an interrupt left more.
_pools: WeakRegistry[_Pool] = WeakRegistry()


class _ChunkReader:
    """The file and the buffers of one thread that reads chunks."""

    def __init__(self, ring: Ring | None, filled: Callable[[_Filled], None]) -> None:
        self._ring = ring
        self._filled = filled
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._path: str | os.PathLike[str] | None = None
        self._file: Descriptor | None = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def read(self, task: _Task) -> bool:
        """Reads one chunk; says no when the ring was closed meanwhile."""
        crc = 0
        for spans in self._calls(task):
            slot = None
            if any(w.target is None for span in spans for w in span.wanted):
                assert self._ring is not None
                slot = self._ring.take()
                if slot is None:
                    return False
            buffers, arrivals = self._buffers(spans, slot)
            offset = spans[0].start
            both = zip(spans, buffers, strict=True)
            for is_left_out, group in groupby(both, lambda each: self._is_left_out(task, each[0])):
                wanted = [buffer for _, buffer in group]
                if is_left_out:
                    num_bytes = sum(buffer.nbytes for buffer in wanted)
                    crc, offset = crc32_of_hole(num_bytes, crc), offset + num_bytes
                    continue
                for step in _steps(wanted):
                    self._fill(task, offset, list(step))
                    for buffer in step:
                        crc = crc if task.crc32 is None else crc32(buffer, crc)
                        offset += buffer.nbytes
            for span, buffer in zip(spans, buffers, strict=True):
                _copy_to_others(span, buffer)
            if slot is not None:
                self._filled(_Filled(slot, arrivals))
        if task.crc32 is not None and crc != task.crc32:
            raise self._corrupt(task, "does not have the checksum that was written")
        return True

    def _calls(self, task: _Task) -> Iterator[list[_FileRange]]:
        """Yields neighbouring spans that one system call reads, cut where they are too long."""
        slot_bytes = self._ring.slot_bytes if self._ring is not None else _CALL_BYTES
        call: list[_FileRange] = []
        left, scratch_left = _CALL_BYTES, SCRATCH_BYTES
        slot_left = slot_bytes
        spans = list(reversed(_bridged(task.spans)))
        while spans:
            span = spans.pop()
            is_new = bool(call) and span.start != call[-1].stop
            room = left
            if not span.wanted:
                room = min(room, scratch_left)
            elif any(w.target is None for w in span.wanted):
                room = min(room, slot_left)
            if is_new or room == 0 or len(call) == _MOST_BUFFERS:
                yield call
                call, left, scratch_left, slot_left = [], _CALL_BYTES, SCRATCH_BYTES, slot_bytes
                spans.append(span)
                continue
            taken = min(room, span.stop - span.start)
            is_all = span.start + taken == span.stop
            call.append(span if is_all else _FileRange(span.start, span.start + taken, span.wanted))
            left -= taken
            if not span.wanted:
                scratch_left -= taken
            elif any(w.target is None for w in span.wanted):
                slot_left -= taken
            if not is_all:
                spans.append(_FileRange(span.start + taken, span.stop, span.wanted))
        if call:
            yield call

    def _buffers(
        self, spans: Sequence[_FileRange], slot: Slot | None
    ) -> tuple[list[memoryview], list[FilledSlot]]:
        """Returns where each span's bytes are read to, and what then is in the slot."""
        buffers, arrivals = [], []
        slot_used = scratch_used = 0
        for span in spans:
            size = span.stop - span.start
            staged = [w for w in span.wanted if w.target is None]
            if staged:
                assert slot is not None
                buffers.append(slot.memory[slot_used : slot_used + size])
                arrivals += [FilledSlot(w, span.start - w.start, slot_used, size) for w in staged]
                slot_used += size
            elif span.wanted:
                first = span.wanted[0]
                assert first.target is not None
                buffers.append(first.target[span.start - first.start :][:size])
            else:
                buffers.append(self._scratch[scratch_used : scratch_used + size])
                scratch_used += size
        return buffers, arrivals

    def _opened(self, task: _Task) -> Descriptor:
        if task.file.path != self._path or self._file is None:
            self.close()
            self._file = Descriptor(task.file.path, os.O_RDONLY)
            self._path = task.file.path
        return self._file

    def _is_left_out(self, task: _Task, span: _FileRange) -> bool:
        """Returns whether a dry run leaves the targets of a range as they are."""
        if not is_dry() or any(w.num_bytes <= MOST_KNOWN_BYTES for w in span.wanted):
            return False
        try:
            return lies_in_hole(self._opened(task), span.start, span.stop - span.start)
        except OSError:  # which reading it will name
            return False

    def _fill(self, task: _Task, offset: int, buffers: list[memoryview]) -> None:
        try:
            file = self._opened(task)
            while buffers:
                count = os.preadv(file.fileno(), buffers, offset)
                if count == 0:
                    raise self._corrupt(task, f"ends at byte {offset}", offset)
                offset += count
                while buffers and count >= buffers[0].nbytes:
                    count -= buffers.pop(0).nbytes
                if count:
                    buffers[0] = buffers[0][count:]
        except OSError as error:
            raise unreadable(task.file.path, error, at=f" at byte {offset}") from error

    def _corrupt(self, task: _Task, what: str, offset: int | None = None) -> CorruptSaveError:
        start, stop = task.spans[0].start, task.spans[-1].stop
        names = list(dict.fromkeys(w.tensor for span in task.spans for w in span.wanted))
        if offset is not None:  # what lies before it was read
            behind = [w.tensor for s in task.spans if s.stop > offset for w in s.wanted]
            names = list(dict.fromkeys(behind)) or names
        return CorruptSaveError(
            f"{_name(task.file)} {what} (bytes {start} to {stop}, which hold {listed(names, 3)}). "
            "Some of what was to be filled has bytes of this save already.",
            file=_name(task.file),
            tensor=names[0],
            offset=start if offset is None else offset,
        )


def _steps(buffers: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Yields buffers and pieces of them, a few at a time."""
    step: list[memoryview] = []
    left = _STEP_BYTES
    for whole in buffers:
        buffer = whole
        while buffer.nbytes:
            step.append(buffer[:left])
            left -= step[-1].nbytes
            buffer = buffer[step[-1].nbytes :]
            if not left:
                yield step
                step, left = [], _STEP_BYTES
    if step:
        yield step


def _bridged(spans: Sequence[_FileRange]) -> list[_FileRange]:
    """Returns the spans with short gaps between them as spans that are not wanted."""
    bridged: list[_FileRange] = []
    for span in spans:
        if bridged and 0 < span.start - bridged[-1].stop <= _BRIDGED_BYTES:
            bridged.append(_FileRange(bridged[-1].stop, span.start))
        bridged.append(span)
    return bridged


def _copy_to_others(span: _FileRange, source: memoryview) -> None:
    """Copies what was read once to all others that want it in host memory."""
    targets = [w for w in span.wanted if w.target is not None]
    is_read_into = len(targets) == len(span.wanted)  # the first one's target is the buffer
    for wanted in targets[1:] if is_read_into else targets:
        assert wanted.target is not None
        first = span.start - wanted.start
        wanted.target[first : first + source.nbytes] = source
