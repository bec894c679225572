"""The one place that code passes before it writes or frees device storage, so that no lane is
still reading it.

A lane that reads device storage says so here with the event after its read; a writer asks here, and
its stream waits, on the device, for the reads that are still under way. A thread that has seen on
the host that a read is over ends it, and no stream waits for it from then on. Invariant, which
``tests/transfer/test_gate.py`` tries to break: a storage is in at most one read of those that one
thread queued on one lane, the newest, because a lane runs in order.

[Note: threads at the gate] Threads come at the same time, and a handler of a signal in the middle
of a call. So there is no lock: reads are put in, ended and taken out by one step of a dict or of a
set of numbers each, and a loop goes over a copy. Two threads' reads on a lane have no known order:
a writer waits for both. ``test_threads_pass_the_gate_at_once`` and
``test_a_read_of_another_thread_is_waited_for_beside`` try to break it.

[Note: captures] What is captured into a graph writes nothing yet; its replay does, which
``mutating`` names. So a writer that is being captured waits for nothing and asks no event, either
of which would end the capture with an error.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from residency import _device
from residency._registries import WeakRegistry

_PRUNE_AT_LEAST = 256  # reads that are kept before a look at which are over; any value works


class Read:
    """The memory that a lane reads until an event, as the gate knows it.

    Attributes:
        reader: The lane and the thread that queued the read: of one reader the newest comes last.
        event: Recorded on the lane after the read. The gate lets go of it in a thread that passes:
            a thread that has chosen no device makes a context on the first one as an event ends.
        storages: Addresses of the storages that it reads, and no newer read of the same reader.
    """

    __slots__ = ("event", "reader", "storages")

    def __init__(self, lane: torch.Stream, event: torch.Event, storages: set[int]) -> None:
        self.reader = (lane.stream_id, threading.get_ident())
        self.event = event
        self.storages = storages

    def end(self) -> None:
        """Says that the host has seen the event; from any thread, and again."""
        self.storages.clear()


class Gate:
    """The order of a device's storages: writers come behind the lanes that read them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numbers = itertools.count()
        self._reads: dict[int, Read] = {}
        self._prune_at = _PRUNE_AT_LEAST
        self._sources: WeakRegistry[Tensor] = WeakRegistry()

    def __len__(self) -> int:
        return sum(len(read.storages) for read in self._under_way())

    def reading(self, tensors: Iterable[Tensor], event: torch.Event, lane: torch.Stream) -> Read:
        """Says that ``lane`` reads the storages of ``tensors`` until ``event``.

        Args:
            tensors: What is read; the caller keeps them until they pass ``before_free``, or until
                the read is ended.
            event: Recorded on ``lane`` after the read was queued.
            lane: The stream that reads.

        Returns:
            The read, for the thread that sees that it is over.
        """
        sources = list(tensors)
        read = Read(lane, event, _storages(sources))
        older = [each for each in self._under_way() if each.reader == read.reader]
        self._reads[next(self._numbers)] = read
        for each in older:
            each.storages.difference_update(read.storages)
        self.note_sources(sources)
        if len(self._reads) > self._prune_at:
            self._prune()
        return read

    def note_sources(self, tensors: Iterable[Tensor]) -> None:
        """Says that a reader keeps these tensors for the sake of its reads."""
        for tensor in tensors:
            self._sources.add(tensor)

    def sources_of(self, storages: Iterable[int]) -> list[Tensor]:
        """Returns the tensors over these storages, by address, that readers keep for their reads.

        They let go of them once they have seen that the copies are done, which may be later.
        """
        wanted = set(storages) - {0}
        return [t for t in self._sources if t.untyped_storage().data_ptr() in wanted]

    def before_write(
        self, tensors: Iterable[Tensor], *, stream: torch.Stream | None = None
    ) -> None:
        """Makes a stream wait for the lanes that still read the storages of ``tensors``.

        It waits once for each reader at most, and not at all while it is being captured. [Note:
        captures]

        Args:
            tensors: What is about to be written.
            stream: Who writes; the current stream of the device when None.
        """
        under_way = self._under_way()
        if not under_way:
            return
        storages = _storages(tensors)
        newest = {r.reader: r.event for r in under_way if not r.storages.isdisjoint(storages)}
        if not newest or _device.is_capturing(self._device):
            return
        writer = _device.current_stream(self._device) if stream is None else stream
        for event in newest.values():
            _device.wait_event(writer, event)  # a copy still reads what is to be written

    def before_free(self, tensors: Sequence[Tensor]) -> None:
        """Does what ``before_write`` does on the current stream, for tensors that the caller drops
        right after.
        """
        self.before_write(tensors)
        storages = _storages(tensors)
        for read in self._under_way():
            read.storages.difference_update(storages)

    def _under_way(self) -> list[Read]:
        """Returns the reads that are not over, and lets go of the others."""
        reads = self._reads.copy()
        for number, read in reads.items():
            if not read.storages:
                self._reads.pop(number, None)
        return [read for read in reads.values() if read.storages]

    def _prune(self) -> None:
        """Ends what is over and no thread has ended, as after an interrupt."""
        for read in self._under_way():
            if read.event.query():
                read.end()
        self._prune_at = max(_PRUNE_AT_LEAST, 2 * len(self._under_way()))


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors} - {0}


gates: dict[torch.device, Gate] = {}


def gate_of(device: torch.device) -> Gate:
    """Returns the gate of a device, made at the first call; all callers share it."""
    return gates.get(device) or gates.setdefault(device, Gate(device))
