"""Reads wanted ranges of files into host memory, checking every chunk that it touches.

Bytes go straight to where they are wanted, or into a slot of a ring from which the
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
from functools import partial
from typing import NamedTuple

from residency._checkpoint._disk._descriptor import Descriptor
from residency._checkpoint._disk._naming import unreadable
from residency._checkpoint._disk._ring import Ring, Slot
from residency._checkpoint._disk._system import System, close_quietly, system_in_use
from residency._checkpoint._disk._wanted import (
    FileRange,
    FileReads,
    Task,
    Wanted,
    name_of,
    tasks_of,
)
from residency._errors import CorruptSaveError, InvalidArgumentError, listed
from residency._registries import WeakRegistry
from residency._threads import begin
from residency._units import parse_bytes

SCRATCH_BYTES = parse_bytes("256KiB")  # for gaps that are read along; holds several of them
_CALL_BYTES = parse_bytes("4MiB")  # at the most what is handed on at once
# Small enough that the checksum finds the bytes in the cache, large enough for a system call.
_STEP_BYTES = parse_bytes("256KiB")
_MOST_BUFFERS = 512  # Linux takes 1024 in a call
_NUM_THREADS = 2  # one reads while the other sums


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
    tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
    num_tasks = 0
    for file in files:
        for task in tasks_of(file):
            tasks.put(task)
            num_tasks += 1
    if num_tasks:
        _Pool(tasks, num_tasks, ring).run(consume, on_bytes)


class _Filled(NamedTuple):
    slot: Slot
    arrivals: list[FilledSlot]


# Bytes of a chunk that was read, or the end of a thread.
_Message = _Filled | int | BaseException | None


class _Pool:
    """The threads that run the tasks, and hand what they filled to the calling thread.

    Invariant, which ``tests/checkpoint/restore/test_read.py`` tries to break: once ``stop`` is over
    no thread writes into a target, whatever interrupted the caller: one that has begun is joined,
    one that begins later finds that it is to stop.
    """

    def __init__(self, tasks: queue.SimpleQueue[Task], num_tasks: int, ring: Ring | None) -> None:
        self._tasks = tasks
        self._ring = ring
        self._done: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._is_stopped = False
        self._threads = [
            threading.Thread(
                target=self._work,
                args=(self._done.put,),
                name=f"residency-read-{index}",
                daemon=True,
            )
            for index in range(min(_NUM_THREADS, num_tasks))
        ]
        self._num_left = len(self._threads)
        self.caller = threading.get_ident()
        _pools.add(self)

    def run(self, consume: Consumer | None, on_bytes: Callable[[int], None] | None) -> None:
        take = partial(self._take, consume, on_bytes)
        try:
            begun = begin(self._threads)
            self._num_left = begun or 1
            if not begun:
                self._work(take)
            while self._num_left:
                take(self._done.get())
        finally:
            self.stop()

    def _take(
        self,
        consume: Consumer | None,
        on_bytes: Callable[[int], None] | None,
        message: _Message,
    ) -> None:
        try:
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

    def _work(self, put: Callable[[_Message], None]) -> None:
        reader = _ChunkReader(self._ring, put)
        try:
            while not self._is_stopped:
                try:
                    task = self._tasks.get_nowait()
                except queue.Empty:
                    break
                if not reader.read(task):
                    break
                put(task.spans[-1].stop - task.spans[0].start)
            put(None)
        except BaseException as error:  # raised again in the calling thread
            put(error)
        finally:
            reader.close()


# Those that have not stopped: one for each thread that reads, unless an interrupt left more.
_pools: WeakRegistry[_Pool] = WeakRegistry()


class _ChunkReader:
    """The file and the buffers of one thread that reads chunks."""

    def __init__(self, ring: Ring | None, filled: Callable[[_Filled], None]) -> None:
        self._system: System = system_in_use()
        self._ring = ring
        self._filled = filled
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._path: str | os.PathLike[str] | None = None
        self._file: Descriptor | None = None

    def close(self) -> None:
        if self._file is not None:
            close_quietly(self._system, self._file)
            self._file = None

    def read(self, task: Task) -> bool:
        """Reads one chunk; says no when the ring was closed meanwhile."""
        crc = 0
        for spans in self._calls(task):
            slot = None
            if any(span.is_staged for span in spans):
                assert self._ring is not None
                slot = self._ring.take()
                if slot is None:
                    return False
            buffers, arrivals = self._buffers(task, spans, slot)
            offset = spans[0].start
            for step in _steps(buffers):
                self._fill(task, offset, list(step))
                for buffer in step:
                    crc = crc if task.crc32 is None else self._system.crc32(buffer, crc)
                    offset += buffer.nbytes
            for span, buffer in zip(spans, buffers, strict=True):
                if len(span.wanted) > 1:
                    _copy_to_others(span, buffer)
            if slot is not None:
                self._filled(_Filled(slot, arrivals))
        if task.crc32 is not None and crc != task.crc32:
            raise self._corrupt(task, "does not have the checksum that was written")
        return True

    def _calls(self, task: Task) -> Iterator[list[FileRange]]:
        """Yields neighbouring spans that one system call reads, cut where they are too long."""
        slot_bytes = self._ring.slot_bytes if self._ring is not None else _CALL_BYTES
        call: list[FileRange] = []
        left, scratch_left = _CALL_BYTES, SCRATCH_BYTES
        slot_left = slot_bytes
        spans = task.spans[::-1]
        while spans:
            span = spans.pop()
            is_new = bool(call) and span.start != call[-1].stop
            room = left
            if span.is_staged:
                room = min(room, slot_left)
            elif not span.wanted:
                room = min(room, scratch_left)
            if is_new or room == 0 or len(call) == _MOST_BUFFERS:
                yield call
                call, left, scratch_left, slot_left = [], _CALL_BYTES, SCRATCH_BYTES, slot_bytes
                spans.append(span)
                continue
            taken = min(room, span.stop - span.start)
            is_all = span.start + taken == span.stop
            if not is_all:
                end = span.start + taken
                spans.append(FileRange(end, span.stop, span.wanted, span.is_staged))
                span = FileRange(span.start, end, span.wanted, span.is_staged)
            call.append(span)
            left -= taken
            if span.is_staged:
                slot_left -= taken
            elif not span.wanted:
                scratch_left -= taken
        if call:
            yield call

    def _buffers(
        self, task: Task, spans: Sequence[FileRange], slot: Slot | None
    ) -> tuple[list[memoryview], list[FilledSlot]]:
        """Returns where each span's bytes are read to, and what then is in the slot."""
        buffers, arrivals = [], []
        slot_used = scratch_used = 0
        for span in spans:
            size = span.stop - span.start
            if span.is_staged:
                assert slot is not None
                buffers.append(slot.memory[slot_used : slot_used + size])
                arrivals += [
                    FilledSlot(w, span.start - w.start, slot_used, size)
                    for w in span.wanted
                    if w.target is None
                ]
                slot_used += size
            elif span.wanted:
                first = span.wanted[0]
                assert first.target is not None
                buffers.append(first.target[span.start - first.start :][:size])
            else:
                buffers.append(self._scratch[scratch_used : scratch_used + size])
                scratch_used += size
            sizes = (w.num_bytes for w in span.wanted)
            buffers[-1] = self._system.target(buffers[-1], task.file.path, span.start, sizes)
        return buffers, arrivals

    def _opened(self, task: Task) -> Descriptor:
        if task.file.path != self._path or self._file is None:
            self.close()
            self._file = self._system.open(task.file.path, os.O_RDONLY)
            self._path = task.file.path
        return self._file

    def _fill(self, task: Task, offset: int, buffers: list[memoryview]) -> None:
        try:
            file = self._opened(task)
            while buffers:
                count = self._system.preadv(file, buffers, offset)
                if count == 0:
                    raise self._corrupt(task, f"ends at byte {offset}", offset)
                offset += count
                while buffers and count >= buffers[0].nbytes:
                    count -= buffers.pop(0).nbytes
                if count:
                    buffers[0] = buffers[0][count:]
        except OSError as error:
            raise unreadable(task.file.path, error, at=f" at byte {offset}") from error

    def _corrupt(self, task: Task, what: str, offset: int | None = None) -> CorruptSaveError:
        start, stop = task.spans[0].start, task.spans[-1].stop
        names = list(dict.fromkeys(w.tensor for span in task.spans for w in span.wanted))
        if offset is not None:  # what lies before it was read
            behind = [w.tensor for s in task.spans if s.stop > offset for w in s.wanted]
            names = list(dict.fromkeys(behind)) or names
        return CorruptSaveError(
            f"{name_of(task.file)} {what} (bytes {start} to {stop}, which hold "
            f"{listed(names, 3)}). Some tensors have bytes of this save already.",
            file=name_of(task.file),
            tensor=names[0],
            offset=start if offset is None else offset,
        )


def _steps(buffers: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Yields buffers and pieces of them, a few at a time."""
    step: list[memoryview] = []
    left = _STEP_BYTES
    for whole in buffers:
        buffer = whole
        while buffer.nbytes >= left:
            yield [*step, buffer[:left]]
            buffer = buffer[left:]
            step, left = [], _STEP_BYTES
        if buffer.nbytes:
            step.append(buffer)
            left -= buffer.nbytes
    if step:
        yield step


def _copy_to_others(span: FileRange, source: memoryview) -> None:
    """Copies what was read once to all others that want it in host memory."""
    if source.readonly:  # a hole of a dry run, which fills nothing
        return
    targets = [w for w in span.wanted if w.target is not None]
    is_read_into = len(targets) == len(span.wanted)  # the first one's target is the buffer
    for wanted in targets[1:] if is_read_into else targets:
        assert wanted.target is not None
        first = span.start - wanted.start
        wanted.target[first : first + source.nbytes] = source
