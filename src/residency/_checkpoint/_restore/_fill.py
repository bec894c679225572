"""Moves bytes from files into tensors, in place: straight into host memory, and through a ring of
page-locked slots and the h2d lane onto the device.

Invariant, which ``tests/checkpoint/restore/test_fill.py`` tries to break: beside the targets, a
fill takes the ring, on the host, and one slot on the device where a device tensor's elements do not
lie in order. Before it writes into the device it passes the gate, and the current stream waits for
the lane.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    Stretch,
    count_stretches,
    row_major,
    spans,
    stretches,
)
from residency._checkpoint._restore._plan import Target, box_of, is_whole
from residency._checkpoint._sources._source import StoredTensor
from residency._errors import InvalidArgumentError, RefusedError
from residency._transfer import (
    Flight,
    Move,
    Mover,
    Slab,
    copy_across,
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
    targets: Iterable[Target],
    *,
    checksums: Mapping[Path, Checksums],
    staging_bytes: int,
    on_bytes: Callable[[int], None] | None = None,
    ring: Staging | None = None,
) -> None:
    """Fills targets with what is stored of them.

    Args:
        targets: What goes where; dtypes and shapes agree.
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
    work = _sorted_out(targets)
    on_device: dict[torch.device, list[Tensor]] = {}
    for local in work.written:
        on_device.setdefault(local.device, []).append(local)
    on_host = on_device.pop(torch.device("cpu"), [])
    movers = [Mover(device) for device in on_device]
    for mover, tensors in zip(movers, on_device.values(), strict=True):
        mover.before_write(tensors)
        mover.follow_to_device()  # work that is queued already may read the targets, or write them
    is_own_ring = ring is None and work.staged_bytes > 0
    if is_own_ring:
        ring = Staging(ring_bytes_of(work.staged_bytes, staging_bytes), pin=bool(movers))
    try:
        # A file is read into the memory of a host tensor, of which autograd would not hear: a
        # graph that kept the tensor's old values would go on with the new ones.
        increment_version(on_host)
        with torch.no_grad():
            _read_in_order(work, checksums, ring, on_bytes)
            if ring is not None:
                _carry(work.of_tensors, ring)
                _land_all(movers)
                _read_out_of_order(work.out_of_order, checksums, ring)
    finally:
        _land_all(movers)
        if is_own_ring and ring is not None:
            ring.release(on_device)


def ring_bytes_of(num_bytes: int, most_bytes: int) -> int:
    """Returns the bytes of a ring for so many that pass through it, where it may have so many."""
    return min(most_bytes, max(1 << num_bytes.bit_length(), 2 * _SMALLEST_SLOT))


def _land_all(movers: Iterable[Mover]) -> None:
    for mover in movers:
        mover.land()  # what the caller queues from now on reads the targets


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
        self._under_way: deque[tuple[Slot, Sequence[Flight]]] = deque()
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
            Mover(device).settle()
        pinned_bytes = self._slab.num_bytes if self._slab.is_pinned else 0
        self._under_way.clear()
        del self._slab, self.ring
        _pinned.give_back_pinned(pinned_bytes)

    def take(self) -> Slot:
        """Waits for a slot."""
        slot = self.ring.take()
        assert slot is not None, "the ring is closed only when a read fails"
        return slot

    def give_back_after(self, slot: Slot, flights: Sequence[Flight]) -> None:
        """Returns a slot to the ring once its bytes are on the device.

        Half of the slots may be under way, so that the other half is always there to be filled;
        this thread alone waits for them.
        """
        self._under_way.append((slot, flights))
        while len(self._under_way) >= self._most_under_way:
            oldest, landed = self._under_way.popleft()
            for flight in landed:
                flight.wait()  # they have read the slot, which is filled anew
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
        whole = (self.slot_bytes - offset) // dtype.itemsize * dtype.itemsize
        typed = self.bytes_at(slot, offset, whole).view(dtype)
        return typed.as_strided(tuple(shape), tuple(stride), None)

    def bytes_at(self, slot: Slot, offset: int, num_bytes: int) -> Tensor:
        """Returns some bytes of a slot."""
        return self._slab.data.narrow(0, slot.tag + offset, num_bytes)


class _ShardBox(NamedTuple):
    """The box of a target that one stored shard has."""

    target: Target
    shard: StoredTensor
    box: Box

    @property
    def view(self) -> Tensor:
        """The target's elements of the box."""
        return _narrowed(self.target.local, self.box.within(self.target.box))


@dataclass(slots=True)
class _Work:
    """The tensors to fill, by how they are filled.

    Attributes:
        written: Those with elements.
        of_files: What is read of each file, where elements lie in order on both sides.
        of_tensors: What is copied from host tensors.
        out_of_order: What is read from files where elements do not lie in order.
        staged_bytes: What passes through the ring.
    """

    written: list[Tensor] = field(default_factory=list)
    of_files: dict[Path, list[Wanted]] = field(default_factory=dict)
    of_tensors: list[_ShardBox] = field(default_factory=list)
    out_of_order: list[_ShardBox] = field(default_factory=list)
    staged_bytes: int = 0


def _sorted_out(targets: Iterable[Target]) -> _Work:
    work = _Work()
    for target in targets:
        if target.local.numel() == 0:
            continue
        work.written.append(target.local)
        for shard in target.shards:
            is_in_order = _lies_in_order(target, shard)
            if is_in_order and is_whole(target, shard):  # as nearly always
                _want(work, target, shard, [Stretch(0, 0, target.local.numel())])
                continue
            shard_box = box_of(shard)
            box = target.box.overlap(shard_box)
            if box is None:
                continue
            if is_in_order and _is_read_by_rows(box, shard_box, target):
                _want(work, target, shard, stretches(box, shard_box, target.box))
                continue
            parts = work.out_of_order if shard.tensor is None else work.of_tensors
            parts.append(_ShardBox(target, shard, box))
            work.staged_bytes += box.numel * shard.dtype.itemsize
    return work


def _lies_in_order(target: Target, shard: StoredTensor) -> bool:
    """Returns whether elements lie in row-major order in the file and in the target."""
    is_row_major = shard.stride is None or tuple(shard.stride) == row_major(shard.shape)
    return shard.tensor is None and is_row_major and target.local.is_contiguous()


def _is_read_by_rows(box: Box, shard_box: Box, target: Target) -> bool:
    count = count_stretches(box, shard_box, target.box)
    num_bytes = box.numel * target.local.element_size()
    return count <= _FEW_STRETCHES or num_bytes // count >= _LONG_STRETCH


def _want(work: _Work, target: Target, shard: StoredTensor, runs: Iterable[Stretch]) -> None:
    """Adds what is stored of a target to what is read, with the places that it goes to."""
    local, itemsize = target.local, shard.dtype.itemsize
    assert shard.file is not None
    wanted = work.of_files.setdefault(shard.file, [])
    memory = memory_of(local) if local.is_cpu else None
    flat = None if local.is_cpu else local.as_strided((local.numel(),), (1,)).view(torch.uint8)
    for source, first, numel in runs:
        start, size = shard.start + source * itemsize, numel * itemsize
        if memory is None:
            wanted.append(Wanted(start, size, target.name, None, (flat, first * itemsize)))
            work.staged_bytes += size
        else:
            here = memory[first * itemsize :][:size] if size < memory.nbytes else memory
            wanted.append(Wanted(start, size, target.name, here))


def _read_in_order(
    work: _Work,
    checksums: Mapping[Path, Checksums],
    ring: Staging | None,
    on_bytes: Callable[[int], None] | None,
) -> None:
    def consume(slot: Slot, arrivals: Sequence[FilledSlot]) -> None:
        assert ring is not None
        copies = []
        for wanted, first, offset, num_bytes in arrivals:
            flat, begin = wanted.destination
            target = flat.narrow(0, begin + first, num_bytes)
            copies.append((target, ring.bytes_at(slot, offset, num_bytes)))
        _queue(ring, slot, copies)

    read_files(
        [FileReads(path, ranges, checksums.get(path)) for path, ranges in work.of_files.items()],
        ring=None if ring is None else ring.ring,
        consume=consume,
        on_bytes=on_bytes,
    )


def _queue(ring: Staging, slot: Slot, copies: Sequence[Move]) -> None:
    """Queues copies of a slot's bytes to devices, after which the ring has the slot again."""
    by_device: dict[torch.device, list[Move]] = {}
    for move in copies:
        by_device.setdefault(move[0].device, []).append(move)
    flights = [Mover(device).to_device(moves) for device, moves in by_device.items()]
    ring.give_back_after(slot, flights)


def _carry(overlaps: Sequence[_ShardBox], ring: Staging) -> None:
    """Copies from host tensors; on the way to a device as many share a slot as fit."""
    slot: Slot | None = None
    used, copies = 0, list[tuple[Tensor, Tensor]]()
    for overlap in overlaps:
        source, box, itemsize = overlap.shard.tensor, overlap.box, overlap.shard.dtype.itemsize
        assert source is not None
        shard, view = box_of(overlap.shard), overlap.view
        if view.is_cpu:
            view.copy_(_narrowed(source, box.within(shard)))
            continue
        for span in spans(box, box, row_major(box.shape), ring.slot_bytes // itemsize):
            size, shape = span.numel * itemsize, span.box.shape
            if slot is not None and used + size > ring.slot_bytes:
                _queue(ring, slot, copies)
                slot = None
            if slot is None:
                slot, used, copies = ring.take(), 0, []
            staged = ring.values(slot, used, overlap.shard.dtype, shape, row_major(shape))
            staged.copy_(_narrowed(source, span.box.within(shard)))
            target = _narrowed(view, span.box.within(box))
            if target.is_contiguous():
                copies.append((raw_bytes(target), ring.bytes_at(slot, used, size)))
            else:
                copy_across(target, staged)  # by way of a copy on the device, on the current stream
            used += -(-size // _ALIGNMENT) * _ALIGNMENT
    if slot is not None:
        _queue(ring, slot, copies)


def _narrowed(tensor: Tensor, box: Box) -> Tensor:
    if tensor.shape == box.shape:
        return tensor
    for dim, (start, size) in enumerate(zip(box.offsets, box.shape, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


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
