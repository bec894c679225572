"""Moves bytes from files into tensors, in place: straight into host memory, and through a ring of
page-locked slots and the h2d lane onto the device.

Invariant, which ``tests/checkpoint/restore/test_fill.py`` tries to break: beside the targets, a
fill takes the ring, on the host, and one slot on the device where a device tensor's elements do not
lie in order. Before it writes into the device it passes the gate, and the current stream waits for
the lane.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from residency import _device, _pinned
from residency._checkpoint._disk._read import FilledSlot, read_files
from residency._checkpoint._disk._ring import Ring, Slot
from residency._checkpoint._disk._wanted import Checksums, FileReads, Wanted
from residency._checkpoint._restore._boxes import (
    Box,
    count_stretches,
    row_major,
    spans,
    stretches,
)
from residency._checkpoint._restore._plan import Assignment, Target, box_of, is_whole
from residency._checkpoint._sources._source import StoredTensor
from residency._errors import InvalidArgumentError, RefusedError
from residency._transfer import (
    CopyRun,
    Lanes,
    Slab,
    copy_across,
    gate_of,
    lanes_of,
    memory_of,
    raw_bytes,
)
from residency._units import format_bytes, parse_bytes

_NUM_SLOTS = 8  # two threads read while copies of others are under way; any few work
_SMALLEST_SLOT = parse_bytes("4KiB")  # a page, which is what the system reads
# Rows are read one by one into their places where they are few or long; else the read takes all of
# the shard, as a call for each row would cost more. Any such values work.
_FEW_STRETCHES = 64
_LONG_STRETCH = parse_bytes("16KiB")
_ALIGNMENT = 16  # no dtype has a larger element


def staging_bytes_of(staging: int | str) -> int:
    """Returns the bytes of a ring: the largest power of two within what is asked for.

    Raises:
        InvalidArgumentError: The size does not parse, or has no room for two slots.
    """
    num_bytes = parse_bytes(staging, name="staging")
    if num_bytes < 2 * _SMALLEST_SLOT:
        raise InvalidArgumentError(
            f"staging is {format_bytes(num_bytes)}; expected at least "
            f"{format_bytes(2 * _SMALLEST_SLOT)}, two slots."
        )
    return 1 << (num_bytes.bit_length() - 1)


def fill(
    assignments: Iterable[Assignment],
    *,
    checksums: Mapping[Path, Checksums],
    staging_bytes: int,
    on_bytes: Callable[[int], None] | None = None,
    ring: Staging | None = None,
) -> None:
    """Fills targets with what is stored of them.

    Args:
        assignments: What goes where; dtypes and shapes agree.
        checksums: Of files, where they are known.
        staging_bytes: The ring's, a power of two.
        on_bytes: Called with the bytes that were read.
        ring: One that the caller keeps for several fills, instead of one for this fill.

    Raises:
        CorruptSaveError: The files are not what was written. Some targets have been filled.
        CheckpointError: A file cannot be read.
        RefusedError: The ring cannot be page-locked.

    Memory:
        A ring of ``staging_bytes`` on the host, less where less is moved, page-locked where it
        feeds a device; for device tensors whose elements are not in order a copy of at most one
        slot on the device, and on the host. All of it is given back, up to 64 MiB of the ring to
        torch's cache of page-locked memory.
    """
    work = _sorted_out(assignments)
    devices = {target.local.device for target in work.targets if not target.local.is_cpu}
    for device in devices:
        written = [t.local for t in work.targets if t.local.device == device]
        gate_of(device).before_write(written)
        lanes = lanes_of(device)
        # Work that is queued already may read the targets, or write them.
        _device.wait_event(lanes.h2d, lanes.mark(_device.current_stream(device)))
    is_own_ring = ring is None and work.needs_ring
    if is_own_ring:
        ring = Staging(ring_bytes_of(work.staged_bytes, staging_bytes), pin=bool(devices))
    try:
        # A file is read into the memory of a host tensor, of which autograd would not hear: a
        # graph that kept the tensor's old values would go on with the new ones.
        increment_version([target.local for target in work.targets if target.local.is_cpu])
        with torch.no_grad():
            _read_in_order(work, checksums, ring, on_bytes)
            _wait_for_lanes(devices)
            if ring is not None:
                for overlap in work.of_tensors:
                    _carry(overlap, ring)
                _wait_for_lanes(devices)
                _read_out_of_order(work.out_of_order, checksums, ring)
    finally:
        _wait_for_lanes(devices)
        if is_own_ring and ring is not None:
            ring.release(devices)


def ring_bytes_of(num_bytes: int, most_bytes: int) -> int:
    """Returns the bytes of a ring for so many that pass through it, where it may have so many."""
    return min(most_bytes, max(1 << num_bytes.bit_length(), 2 * _SMALLEST_SLOT))


def _wait_for_lanes(devices: Iterable[torch.device]) -> None:
    for device in devices:
        lanes = lanes_of(device)
        # What the caller queues from now on reads the targets.
        _device.wait_event(_device.current_stream(device), lanes.mark(lanes.h2d))


class Staging:
    """A ring of slots in one allocation."""

    def __init__(self, num_bytes: int, *, pin: bool) -> None:
        try:
            self._slab = Slab(num_bytes, pin=pin)
        except (RuntimeError, MemoryError) as error:
            if _device.is_lost(error):
                raise
            raise RefusedError(
                f"a staging ring of {format_bytes(num_bytes)} could not be page-locked ({error}). "
                "Nothing was changed; pass a smaller `staging`."
            ) from error
        num_slots = _NUM_SLOTS if num_bytes >= _NUM_SLOTS * _SMALLEST_SLOT else 2
        self.slot_bytes = num_bytes // num_slots
        self._under_way: deque[tuple[Slot, torch.Event]] = deque()
        self._most_under_way = num_slots // 2
        memory = memory_of(self._slab.data)
        self.ring = Ring(
            [
                Slot(memory[start : start + self.slot_bytes], tag=start)
                for start in range(0, num_slots * self.slot_bytes, self.slot_bytes)
            ]
        )

    def release(self, devices: Iterable[torch.device]) -> None:
        """Gives the memory back, once no copy to these devices reads it."""
        for device in devices:
            lanes_of(device).mark(lanes_of(device).h2d).synchronize()  # it reads the ring
        pinned_bytes = self._slab.num_bytes if self._slab.is_pinned else 0
        self._under_way.clear()
        del self._slab, self.ring
        _pinned.give_back_pinned(pinned_bytes)

    def take(self) -> Slot:
        """Waits for a slot."""
        slot = self.ring.take()
        assert slot is not None, "the ring is closed only when a read fails"
        return slot

    def give_back_after(self, slot: Slot, event: torch.Event) -> None:
        """Returns a slot to the ring once its bytes are on the device.

        Half of the slots may be under way, so that the other half is always there to be filled;
        this thread alone waits for events.
        """
        self._under_way.append((slot, event))
        while len(self._under_way) >= self._most_under_way:
            oldest, landed = self._under_way.popleft()
            landed.synchronize()  # the copy has read the slot, which is filled anew
            self.ring.give_back(oldest)

    def values(
        self,
        slot: Slot,
        offset: int,
        dtype: torch.dtype,
        shape: Sequence[int],
        stride: Sequence[int],
    ) -> Tensor:
        """Returns what lies in a slot as a tensor."""
        typed = self._slab.data[slot.tag + offset : slot.tag + self.slot_bytes]
        whole = typed.numel() // dtype.itemsize * dtype.itemsize
        return typed[:whole].view(dtype).as_strided(tuple(shape), tuple(stride), None)

    def run(self, slot: Slot, slot_offset: int, target_offset: int, num_bytes: int) -> CopyRun:
        """Returns the copy of a slot's bytes to a place in a device buffer."""
        return CopyRun(self._slab, slot.tag + slot_offset, target_offset, num_bytes)


class _ShardBox(NamedTuple):
    """The box of a target that one stored shard has, and where in the whole that shard is."""

    target: Target
    shard: StoredTensor
    box: Box
    shard_box: Box

    @property
    def view(self) -> Tensor:
        """The target's elements of the box."""
        view = self.target.local
        inner = self.box.within(self.target.box)
        for dim, (start, size) in enumerate(zip(inner.offsets, inner.shape, strict=True)):
            view = view.narrow(dim, start, size)
        return view


@dataclass(slots=True)
class _Work:
    """The tensors to fill, by how they are filled.

    Attributes:
        in_order: From files, where elements lie in order on both sides.
        of_tensors: From host tensors.
        out_of_order: From files, where they do not.
    """

    targets: list[Target] = field(default_factory=list)
    in_order: list[_ShardBox] = field(default_factory=list)
    of_tensors: list[_ShardBox] = field(default_factory=list)
    out_of_order: list[_ShardBox] = field(default_factory=list)

    @property
    def needs_ring(self) -> bool:
        is_staged = any(not overlap.target.local.is_cpu for overlap in self.in_order)
        return bool(is_staged or self.of_tensors or self.out_of_order)

    @property
    def staged_bytes(self) -> int:
        parts = (*self.in_order, *self.of_tensors, *self.out_of_order)
        return sum(overlap.box.numel * overlap.shard.dtype.itemsize for overlap in parts)


def _sorted_out(assignments: Iterable[Assignment]) -> _Work:
    work = _Work()
    for target, shards in ((a.target, a.shards) for a in assignments):
        if target.local.numel() == 0:
            continue
        work.targets.append(target)
        for shard in shards:
            shard_box = target.box if is_whole(target, shard) else box_of(shard)
            box = target.box.overlap(shard_box)
            if box is None:
                continue
            overlap = _ShardBox(target, shard, box, shard_box)
            if shard.tensor is not None:
                work.of_tensors.append(overlap)
            elif _is_in_order(overlap):
                work.in_order.append(overlap)
            else:
                work.out_of_order.append(overlap)
    return work


def _is_in_order(overlap: _ShardBox) -> bool:
    target, shard, box, shard_box = overlap
    if not target.local.is_contiguous():
        return False
    if shard.stride is not None and tuple(shard.stride) != row_major(shard.shape):
        return False
    count = count_stretches(box, shard_box, target.box)
    return count <= _FEW_STRETCHES or box.numel // count * shard.dtype.itemsize >= _LONG_STRETCH


def _read_in_order(
    work: _Work,
    checksums: Mapping[Path, Checksums],
    ring: Staging | None,
    on_bytes: Callable[[int], None] | None,
) -> None:
    wanted: dict[Path, list[Wanted]] = {}
    for overlap in work.in_order:
        assert overlap.shard.file is not None
        wanted.setdefault(overlap.shard.file, []).extend(_ranges(overlap))

    def consume(slot: Slot, arrivals: Sequence[FilledSlot]) -> None:
        assert ring is not None
        for each in arrivals:
            flat, first = each.wanted.destination
            run = ring.run(slot, each.slot_offset, first + each.first, each.num_bytes)
            event = lanes_of(flat.device).load(flat, [run])
        ring.give_back_after(slot, event)

    read_files(
        [FileReads(path, ranges, checksums.get(path)) for path, ranges in wanted.items()],
        ring=None if ring is None else ring.ring,
        consume=consume,
        on_bytes=on_bytes,
    )


def _ranges(overlap: _ShardBox) -> Iterator[Wanted]:
    """Yields the bytes of an overlap, with the places that they go to."""
    local, shard = overlap.target.local, overlap.shard
    memory = memory_of(local) if local.is_cpu else None
    flat = raw_bytes(local) if memory is None else None
    itemsize = shard.dtype.itemsize
    for source, target, numel in stretches(overlap.box, overlap.shard_box, overlap.target.box):
        start, first, size = shard.start + source * itemsize, target * itemsize, numel * itemsize
        if memory is None:
            yield Wanted(start, size, overlap.target.name, None, (flat, first))
        else:
            here = memory if size == memory.nbytes else memory[first : first + size]
            yield Wanted(start, size, overlap.target.name, here)


def _carry(overlap: _ShardBox, ring: Staging) -> None:
    """Copies from a host tensor, a slot at a time."""
    source = overlap.shard.tensor
    assert source is not None
    shard = box_of(overlap.shard)
    view = overlap.view
    if view.is_cpu:
        view.copy_(_narrowed(source, overlap.box.within(shard)))
        return
    itemsize = overlap.shard.dtype.itemsize
    for span in spans(
        overlap.box, overlap.box, row_major(overlap.box.shape), ring.slot_bytes // itemsize
    ):
        slot = ring.take()
        shape = span.box.shape
        staged = ring.values(slot, 0, overlap.shard.dtype, shape, row_major(shape))
        staged.copy_(_narrowed(source, span.box.within(shard)))
        _deliver(_narrowed(view, span.box.within(overlap.box)), staged, ring, slot)


def _narrowed(tensor: Tensor, box: Box) -> Tensor:
    for dim, (start, size) in enumerate(zip(box.offsets, box.shape, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def _deliver(view: Tensor, staged: Tensor, ring: Staging, slot: Slot) -> None:
    """Copies values that begin a slot to the device, and gives the slot back."""
    lanes: Lanes = lanes_of(view.device)
    if not view.is_contiguous():
        copy_across(view, staged)  # by way of a copy on the device, on the current stream
        ring.give_back_after(slot, lanes.mark(_device.current_stream(view.device)))
        return
    flat = raw_bytes(view)
    ring.give_back_after(slot, lanes.load(flat, [ring.run(slot, 0, 0, flat.numel())]))


class _StagedBox(NamedTuple):
    """A box on its way through a slot."""

    view: Tensor
    values: Tensor
    wanted: Wanted
    file: Path


def _read_out_of_order(
    parts: Sequence[_ShardBox], checksums: Mapping[Path, Checksums], ring: Staging
) -> None:
    """Reads boxes with whatever lies between their elements into a slot, and copies the elements.

    As many boxes share a slot as fit, because each read checks whole chunks.
    """
    if not parts:
        return
    slot = ring.take()
    batch: list[_StagedBox] = []
    used = 0
    for overlap in parts:
        shard, itemsize = overlap.shard, overlap.shard.dtype.itemsize
        strides = tuple(shard.stride) if shard.stride is not None else row_major(shard.shape)
        most = ring.slot_bytes // itemsize
        for span in spans(overlap.box, box_of(shard), strides, most):
            size = span.numel * itemsize
            if used + size > ring.slot_bytes:
                _copy_batch(batch, checksums)
                batch, used = [], 0
            values = ring.values(slot, used, shard.dtype, span.box.shape, strides)
            start = shard.start + span.start * itemsize
            wanted = Wanted(start, size, overlap.target.name, slot.memory[used : used + size])
            view = _narrowed(overlap.target.local, span.box.within(overlap.target.box))
            assert shard.file is not None
            batch.append(_StagedBox(view, values, wanted, shard.file))
            used += -(-size // _ALIGNMENT) * _ALIGNMENT
    _copy_batch(batch, checksums)
    ring.ring.give_back(slot)


def _copy_batch(batch: Sequence[_StagedBox], checksums: Mapping[Path, Checksums]) -> None:
    wanted: dict[Path, list[Wanted]] = {}
    for each in batch:
        wanted.setdefault(each.file, []).append(each.wanted)
    read_files([FileReads(path, each, checksums.get(path)) for path, each in wanted.items()])
    for each in batch:
        copy_across(each.view, each.values)
    for device in {each.view.device for each in batch if not each.view.is_cpu}:
        lanes_of(device).mark(_device.current_stream(device)).synchronize()  # the slot is next
