"""Copy streams, one per direction and device, and the raw copies that run on them.

Made once per device and kept: a stream per step would be an allocator pool per step. Invariant,
which ``tests/transfer/test_lanes.py`` tries to break: the copies of a lane run in the order of
their issue, so waiting for a lane's newest event waits for all before it. All threads share the
streams; each enters one by ``on_lane`` alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from residency import _device, _pinned
from residency._transfer import _events
from residency._transfer._slab import Slab, align_up
from residency._units import MIB

_IS_IN_TURN = os.environ.get("RESIDENCY_COPIES_IN_TURN") == "1"
_CHUNK_BYTES = 16 * MIB  # 0.3 ms of a link; smaller ones cost the call more


class CopyRun(NamedTuple):
    """One copy: ``num_bytes`` at ``slab_offset`` of a slab and at ``slot_offset`` of a device
    buffer.
    """

    slab: Slab
    slab_offset: int
    slot_offset: int
    num_bytes: int

    def into(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the target and the source of a copy from the slab into a device buffer."""
        target, source = self.out_of(buffer)
        return source, target

    def out_of(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the target and the source of a copy from a device buffer into the slab."""
        in_slab = self.slab.data.narrow(0, self.slab_offset, self.num_bytes)
        return in_slab, buffer.narrow(0, self.slot_offset, self.num_bytes)


def joined_runs(runs: Iterable[tuple[CopyRun, bool]]) -> list[CopyRun]:
    """Joins copies that follow each other on both sides.

    Each comes with whether its entry is padded to the alignment, as all but cuts are.
    The padding after a whole entry belongs to no entry and may be copied along; after a cut, the
    bytes up to the next alignment are the next cut's.
    """
    joined: list[tuple[CopyRun, bool]] = []
    for run, is_padded in runs:
        if joined:
            last, was_padded = joined[-1]
            reach = align_up(last.num_bytes) if was_padded else last.num_bytes
            if (
                last.slab is run.slab
                and last.slab_offset + reach == run.slab_offset
                and last.slot_offset + reach == run.slot_offset
            ):
                grown = CopyRun(
                    last.slab, last.slab_offset, last.slot_offset, reach + run.num_bytes
                )
                joined[-1] = (grown, is_padded)
                continue
        joined.append((run, is_padded))
    return [run for run, _ in joined]


@dataclass(frozen=True, slots=True)
class Lanes:
    """The copy streams of a device.

    Attributes:
        device: The accelerator.
        h2d: The lane from the host to the device.
        d2h: The lane from the device to the host.
        turn: A stream that takes turns with ``d2h``; see ``copy_out``.
    """

    device: torch.device
    h2d: torch.Stream
    d2h: torch.Stream
    turn: torch.Stream

    def mark(self, stream: torch.Stream, *, timed: bool = False) -> torch.Event:
        """Returns an event that is done when everything now queued on ``stream`` is.

        It is recorded anew once there is no reference to it.
        """
        event = _events.new_event(self.device, timed=timed)
        with _device.on(self.device):
            event.record(stream)
        return event

    def synchronize(self) -> None:
        """Blocks the host until all copies of the lanes have ended."""
        for lane in (self.h2d, self.turn, self.d2h):
            with _device.on(self.device):
                lane.synchronize()  # the copies use memory that is to be another's


_lanes: dict[torch.device, Lanes] = {}


def lanes_of(device: torch.device) -> Lanes:
    """Returns the lanes of a device, made at the first call."""
    if device not in _lanes:
        _lanes[device] = Lanes(device, *(_device.new_stream(device) for _ in range(3)))
        _pinned.wait_by({each: lanes.synchronize for each, lanes in _lanes.items()})
    return _lanes[device]


@contextmanager
def on_lane(lane: torch.Stream) -> Iterator[None]:
    """Makes a lane the calling thread's current stream, on its device, within a ``with``.

    A stream object keeps the stream that it displaced when a thread entered it. Two threads in one
    object would swap their streams as they leave, so each thread enters an object of its own.
    """
    own = torch.Stream(
        stream_id=lane.stream_id, device_index=lane.device_index, device_type=lane.device_type
    )
    with _device.on(lane.device), own:
        yield


@contextmanager
def on_default_stream(device: torch.device) -> Iterator[None]:
    """Makes the default stream of a device the calling thread's current one within a ``with``."""
    current = _device.current_stream(device)
    if current.stream_id == 0:
        yield
        return
    where = {"device_index": current.device_index, "device_type": current.device_type}
    with on_lane(torch.Stream(stream_id=0, **where)):
        yield


def copy_on(lane: torch.Stream, copies: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Queues on a lane a copy into each first tensor from its second.

    Both stay until the lane is done: the caller marks it afterwards. The host waits only for
    copies of memory that is not page-locked.
    """
    if pairs := list(copies):
        targets, sources = zip(*pairs, strict=True)
        with on_lane(lane):
            # The loop over `copy_` at half the time; torch has no public name for it (2.11 to 2.13)
            torch._foreach_copy_(targets, sources, non_blocking=True)  # pyright: ignore[reportPrivateImportUsage]


def copy_out(lanes: Lanes, copies: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Queues copies to the host on the d2h lane, into each first tensor from its second.

    ``RESIDENCY_COPIES_IN_TURN=1`` queues them in chunks, each of which waits for the one before it
    on the other of two streams. On a copy engine that serves what is ready, a loop that reads a
    number meanwhile waits for one chunk; on one that serves in order of issue, for all, as without.

    Args:
        lanes: Of the device. What is queued on the d2h lane afterwards comes after all copies.
        copies: Contiguous tensors, of one dtype and shape for each pair.
    """
    if not _IS_IN_TURN:
        copy_on(lanes.d2h, copies)
        return
    lane, other = lanes.d2h, lanes.turn
    for chunk in _chunks(copies):
        copy_on(lane, chunk)
        _device.wait_event(other, lanes.mark(lane))  # so that the engine sees one chunk at a time
        lane, other = other, lane


def _chunks(copies: Iterable[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    chunk: list[tuple[Tensor, Tensor]] = []
    left = _CHUNK_BYTES
    for pair in copies:
        target, source = (each.view(-1).view(torch.uint8) for each in pair)
        start, size = 0, source.numel()
        while start < size:
            num_bytes = min(left, size - start)
            chunk.append((target.narrow(0, start, num_bytes), source.narrow(0, start, num_bytes)))
            start, left = start + num_bytes, left - num_bytes
            if not left:
                yield chunk
                chunk, left = [], _CHUNK_BYTES
    if chunk:
        yield chunk


def raw_bytes(tensor: Tensor) -> Tensor:
    """Returns the bytes of a tensor in memory order, as ``uint8`` of shape ``[num_bytes]``.

    A tensor whose elements do not fill one range of memory is made contiguous first, a copy of its
    bytes.
    """
    tensor = tensor.detach()
    if not torch.ops.aten.is_non_overlapping_and_dense.default(tensor):
        tensor = tensor.contiguous()
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)
