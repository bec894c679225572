"""The one place that whoever writes or frees device storage passes, so that no lane is still
reading it.

A lane that reads device storage says so here with the event after its read; a writer asks here, and
its stream waits, on the device, for the reads that are still under way. Invariant: at most one
entry per storage and lane, the newest, because a lane runs in order.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from residency import _device
from residency._transfer._lanes import Lanes, Run, raw_bytes
from residency._transfer._slab import Region

_PRUNE_AT_LEAST = 256


class Gate:
    """Orders the writers of a device's storages behind the lanes that read them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reads: dict[int, dict[int, torch.Event]] = {}
        self._prune_at = _PRUNE_AT_LEAST
        self._sources: list[weakref.ref[Tensor]] = []

    def __len__(self) -> int:
        return sum(len(by_lane) for by_lane in self._reads.values())

    def reading(self, tensors: Iterable[Tensor], event: torch.Event, lane: torch.Stream) -> None:
        """Says that ``lane`` reads the storages of ``tensors`` until ``event``.

        Args:
            tensors: What is read; the caller keeps them until they pass ``before_free``.
            event: Recorded on ``lane`` after the read was queued.
            lane: The stream that reads.
        """
        read = list(tensors)
        for pointer in _storages(read):
            self._reads.setdefault(pointer, {})[lane.stream_id] = event
        self.keeping(read)

    def keeping(self, tensors: Iterable[Tensor]) -> None:
        """Says that a reader keeps these tensors for the sake of its reads."""
        self._sources += map(weakref.ref, tensors)
        if max(len(self._reads), len(self._sources)) > self._prune_at:
            self._prune()

    def sources_of(self, storages: Iterable[int]) -> list[Tensor]:
        """Returns the tensors over these storages, by address, that readers keep for their reads.

        They let go of them once they have seen that the copies are done, which may be later.
        """
        wanted = set(storages) - {0}
        alive = [tensor for ref in self._sources if (tensor := ref()) is not None]
        return [t for t in alive if t.untyped_storage().data_ptr() in wanted]

    def before_write(
        self, tensors: Iterable[Tensor], *, stream: torch.Stream | None = None
    ) -> None:
        """Makes a stream wait for the lanes that still read the storages of ``tensors``.

        Args:
            tensors: What is about to be written.
            stream: Who writes; the current stream of the device when None.
        """
        if not self._reads:
            return
        writer = _device.current_stream(self._device) if stream is None else stream
        for pointer in _storages(tensors):
            for event in self._reads.get(pointer, {}).values():
                writer.wait_event(event)

    def before_free(self, tensors: Sequence[Tensor]) -> None:
        """Is ``before_write`` on the current stream, for tensors that the caller drops right
        after.
        """
        self.before_write(tensors)
        for pointer in _storages(tensors):
            self._reads.pop(pointer, None)

    def _prune(self) -> None:
        for pointer, by_lane in list(self._reads.items()):
            if all(event.query() for event in by_lane.values()):
                del self._reads[pointer]
        self._sources = [ref for ref in self._sources if ref() is not None]
        self._prune_at = max(_PRUNE_AT_LEAST, 2 * len(self._reads), 2 * len(self._sources))


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors} - {0}


gates: dict[torch.device, Gate] = {}


def gate_of(device: torch.device) -> Gate:
    """Returns the gate of a device, made at the first call; everybody shares it."""
    return gates.setdefault(device, Gate(device))


def copy_to_host(
    tensors: Sequence[Tensor], regions: Sequence[Region], *, lanes: Lanes, gate: Gate
) -> torch.Event:
    """Queues copies of device tensors into slab regions on the d2h lane and tells the gate.

    The lane first waits for what the current stream has queued so far, so the bytes are those of
    the moment of the call.

    Args:
        tensors: Device tensors; their bytes are copied in memory order.
        regions: For each tensor, where its bytes go.
        lanes: The lanes of the tensors' device.
        gate: The gate of the tensors' device.

    Returns:
        The event after the last copy; wait for it before reading the regions.

    Memory:
        No device memory, except a contiguous copy of a tensor that is not dense.
    """
    buffers = [raw_bytes(tensor) for tensor in tensors]
    runs = [
        [Run(region.slab, region.offset, 0, buffer.numel())] if buffer.numel() else []
        for buffer, region in zip(buffers, regions, strict=True)
    ]
    lanes.d2h.wait_event(lanes.mark(_device.current_stream(lanes.device)))
    event = lanes.store(zip(buffers, runs, strict=True))
    gate.reading(buffers, event, lanes.d2h)
    # A contiguous copy dies with this frame; its memory must outlive the lane's read.
    originals = _storages(tensors)
    gate.before_free([b for b in buffers if b.untyped_storage().data_ptr() not in originals])
    return event
