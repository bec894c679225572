"""Page-locked host memory, a few large allocations shared by many tensors.

A slab is one allocation whose size is a power of two, because torch's pinned allocator rounds up to
one. An arena packs entries into slabs; each entry becomes a tensor with a storage of its *own* at
offset 0, so that ``torch.save`` of one state writes that state and not the slab, and so that alias
detection sees no sharing. Invariant, which ``tests/transfer/test_slab.py`` tries to break: the
ranges of live entries never overlap, and a range is used again only when no tensor over it is left.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from residency import _device, _pinned
from residency._errors import RefusedError
from residency._modes import callers_modes_off
from residency._system import in_forked_child
from residency._transfer._host_memory import (
    ask_for_large_pages,
    available_host_bytes,
    locked_limit,
)
from residency._transfer._lending import lending
from residency._units import MIB, format_bytes, parse_bytes

# The caching allocator's own granularity: an entry lies in a slot as it would lie in an allocation.
ALIGNMENT = 512
# Up to this, one slab that is too large is cheaper than two.
_SMALLEST_RESERVED_SLAB = parse_bytes("64KiB")
_LARGEST_UNANNOUNCED_SLAB = 64 * MIB  # what may stay unused where nothing said how much comes
# Large, because the gap at a slab's end may be as large as an entry.
_LARGEST_SLAB = parse_bytes("8GiB")


def align_up(num_bytes: int) -> int:
    """Returns the bytes that an entry of ``num_bytes`` takes in a slab or a slot."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def memory_of(tensor: Tensor) -> memoryview:
    """Returns the bytes of a contiguous host tensor; they keep it alive."""
    num_bytes = tensor.numel() * tensor.element_size()
    if not num_bytes:
        return memoryview(b"")
    buffer = (ctypes.c_char * num_bytes).from_address(tensor.data_ptr())
    buffer.tensor = tensor  # type: ignore[attr-defined]  # the buffer owns what it points to
    return memoryview(buffer).cast("B")


def _power_of_two_at_least(num_bytes: int) -> int:
    return 1 << max(num_bytes - 1, 0).bit_length()


def _power_of_two_at_most(num_bytes: int) -> int:
    return 1 << (num_bytes.bit_length() - 1)


@callers_modes_off()
def _allocate_pages(num_bytes: int) -> Tensor:
    """Allocates host bytes that begin at a page, as page-locked memory does."""
    data = _device.unfilled_bytes(num_bytes + _pinned.PAGE, torch.device("cpu"))
    data = data.narrow(0, -data.data_ptr() % _pinned.PAGE, num_bytes)
    ask_for_large_pages(data.data_ptr(), num_bytes)
    return data


class _Ranges:
    """The lock of all lists of free ranges: a step and a snapshot's reader take some at once."""

    lock = threading.RLock()


def _forget_lock() -> None:
    _Ranges.lock = threading.RLock()


in_forked_child(_forget_lock)  # a thread of the parent's may have held it


class Slab:
    """One host allocation, page-locked unless that was not wanted.

    Attributes:
        data: ``uint8`` of shape ``[num_bytes]``. Copies are issued from it, not from the views,
            because torch's pinned allocator knows only its own tensors and keeps freed ones until
            copies ended.
        is_pinned: Whether it is page-locked.
    """

    __slots__ = ("_free", "_memory", "data", "is_pinned")

    def __init__(self, num_bytes: int, *, pin: bool = True) -> None:
        self.is_pinned = pin
        self.data = _pinned.allocate_pinned(num_bytes) if pin else _allocate_pages(num_bytes)
        self._free = [(0, num_bytes)]
        self._memory: memoryview | None = None

    @property
    def num_bytes(self) -> int:
        return self.data.numel()

    def memory(self, offset: int, num_bytes: int) -> memoryview:
        """Returns a range of the bytes, which keeps all of them alive."""
        if self._memory is None:
            self._memory = memory_of(self.data)
        return self._memory[offset : offset + num_bytes]

    @property
    def free_bytes(self) -> int:
        return sum(size for _, size in self._free)

    def take(self, num_bytes: int, count: int = 1) -> list[int]:
        """Takes up to so many ranges of one size, each the first that is free; returns their
        offsets, ascending.
        """
        offsets: list[int] = []
        free: list[tuple[int, int]] = []
        with _Ranges.lock:
            for start, size in self._free:
                end = start + min(size // num_bytes, count - len(offsets)) * num_bytes
                offsets += range(start, end, num_bytes)
                if end < start + size:
                    free.append((end, start + size - end))
            self._free = free
        return offsets

    def emptied(self) -> Slab:
        """Returns a slab over the same memory with all of it free."""
        other = object.__new__(Slab)
        other.is_pinned, other.data, other._free = self.is_pinned, self.data, [(0, self.num_bytes)]
        other._memory = self._memory
        return other

    def put_back(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Frees ranges, by offset and size, and merges them with their free neighbours."""
        with _Ranges.lock:
            merged: list[tuple[int, int]] = []
            for start, size in sorted([*self._free, *ranges]):
                if merged and merged[-1][0] + merged[-1][1] == start:
                    merged[-1] = (merged[-1][0], merged[-1][1] + size)
                else:
                    merged.append((start, size))
            self._free = merged


@dataclass(slots=True, eq=False)
class Region:
    """The range of one entry: ``num_bytes`` is a multiple of ``ALIGNMENT``."""

    slab: Slab
    offset: int
    num_bytes: int

    def touch(self) -> None:
        """Writes to all of it, so that the system finds the pages now and not at the first copy.

        Page-locked memory has its pages from the beginning.
        """
        if not self.slab.is_pinned:
            self.slab.data.narrow(0, self.offset, self.num_bytes).zero_()


@callers_modes_off()
def views_in(regions: Sequence[Region], like: Tensor) -> Sequence[Tensor]:
    """Returns a tensor like a contiguous one at the beginning of each region, as views of slabs;
    those of ranges of one size that follow one another are made at once.
    """
    first, step = regions[0], regions[0].num_bytes
    offsets = range(first.offset, first.offset + step * len(regions), step)
    is_one_run = [region.offset for region in regions] == list(offsets)
    if not is_one_run or len({region.slab for region in regions}) > 1:
        half = len(regions) // 2
        return [*views_in(regions[:half], like), *views_in(regions[half:], like)]
    flat = first.slab.data.narrow(0, first.offset, step * len(regions)).view(like.dtype)
    shape, stride = (len(regions), *like.shape), (step // like.element_size(), *like.stride())
    return flat.as_strided(shape, stride, flat.storage_offset()).unbind()


class SlabArena:
    """A packing of entries into slabs, allocated ahead by ``reserve`` or as they are needed.

    Attributes:
        is_pinned: Whether slabs that come from here on are page-locked.
        is_reused: Whether slabs stay when nothing in them is in use; set it to reuse them.
    """

    def __init__(self, *, pin: bool = True, reuse: bool = False) -> None:
        self.is_pinned = pin
        self.is_reused = reuse
        self._may_pin = pin
        self._slabs: list[Slab] = []
        # Ranges come back from finalizers, at any moment and on any thread: only append here.
        self._returned: deque[Region] = deque()

    @property
    def slab_bytes(self) -> int:
        """The bytes of all slabs."""
        self._collect()
        return sum(slab.num_bytes for slab in self._slabs)

    @property
    def pinned_bytes(self) -> int:
        """The bytes of the slabs that are page-locked."""
        self._collect()
        return sum(slab.num_bytes for slab in self._slabs if slab.is_pinned)

    @property
    def used_bytes(self) -> int:
        """The bytes of all live entries, each rounded up to ``ALIGNMENT``."""
        return self.slab_bytes - sum(slab.free_bytes for slab in self._slabs)

    def pin_for(self, is_on_device: bool) -> None:
        """Page-locks slabs from here on where a device copies to them, if they may be.

        Bytes that come from the host gain nothing from it, and page-locking makes a context on an
        accelerator that the process may never use. Unused slabs that a device is to copy to and
        that are not page-locked go.
        """
        self.is_pinned = self._may_pin and is_on_device and _device.is_pinning_available()
        self._collect()
        if self.is_pinned:
            self._slabs = [s for s in self._slabs if s.is_pinned or s.free_bytes < s.num_bytes]

    def reserve(self, sizes: Sequence[int]) -> None:
        """Allocates slabs for entries that ``allocate`` is asked for next, in this order.

        Page-locked slabs are powers of two that add up to the entries, with what is left at the
        end of each; others are one slab of just the size.

        Args:
            sizes: The bytes of each entry.

        Raises:
            RefusedError: The host has no room, or memory cannot be page-locked; nothing was
                allocated.
        """
        entries = [align_up(max(size, 1)) for size in sizes]
        planned = [sum(entries)] * bool(entries)
        if self.is_pinned and entries:
            # Entries just over half a slab fit no sum of powers of two; one slab takes them all.
            one = [_power_of_two_at_least(sum(entries))]
            planned = min(_slab_sizes(entries), one, key=sum)
        _require_host_room(sum(planned))
        made = [self._new_slab(size) for size in planned]
        self._slabs += made

    def allocate(self, num_bytes: int) -> Region:
        """Returns a range for an entry; give it back with ``release``, or never after ``tensor``.

        Raises:
            RefusedError: A new slab is needed and the host has no room for it, or it cannot be
                page-locked.
        """
        found = self.find_room(num_bytes)
        if found is not None:
            return found
        wanted = align_up(max(num_bytes, 1))
        slab = self._grow(wanted)
        (offset,) = slab.take(wanted)
        return Region(slab, offset, wanted)

    def holds(self, tensor: Tensor) -> bool:
        """Returns whether a host tensor lies in one of the slabs."""
        address = tensor.data_ptr()
        starts = ((slab.data.data_ptr(), slab.num_bytes) for slab in self._slabs)
        return any(start <= address < start + size for start, size in starts)

    def find_room(self, num_bytes: int) -> Region | None:
        """Returns a range in the slabs that there are, or None."""
        return self._find([num_bytes])[0]

    def _find(self, sizes: Iterable[int]) -> list[Region | None]:
        """Returns ranges of these sizes, each in the first slab with room; None where none has."""
        self._collect()
        found: list[Region | None] = []
        for size, alike in itertools.groupby(sizes):
            wanted, num_left = align_up(max(size, 1)), len(list(alike))
            for slab in self._slabs:
                offsets = slab.take(wanted, num_left)
                found += [Region(slab, offset, wanted) for offset in offsets]
                num_left -= len(offsets)
                if not num_left:
                    break
            found += [None] * num_left
        return found

    def allocate_all(self, sizes: Sequence[int]) -> list[Region]:
        """Takes ranges of these sizes, in this order; where there is no room for all, unused slabs
        go and just what the ranges need is allocated.

        Raises:
            RefusedError: The host has no room; no range is taken.
        """
        for is_second in (False, True):
            if is_second:
                self.free_all()
                self.reserve(sizes)
            found = self._find(sizes)
            regions = [region for region in found if region is not None]
            if len(regions) == len(found):
                return regions
            for region in regions:
                self.release(region)
        raise AssertionError("a slab has no room for the entries that it was made for")

    def make_room(self, sizes: Sequence[int]) -> None:
        """Allocates what is missing for entries of these sizes beside what is in use; the next
        entries of these sizes, in this order, then find room.

        Raises:
            RefusedError: The host has no room; nothing was allocated.
        """
        found = self._find(sizes)
        missing = [size for size, region in zip(sizes, found, strict=True) if region is None]
        try:
            self.reserve(missing)
        finally:
            for region in found:
                if region is not None:
                    self.release(region)

    def emptied(self) -> SlabArena:
        """Returns an arena over the same slabs in which nothing is in use.

        For a caller that gives back all entries at once, those included that an interrupt lost:
        ranges of this arena that come back later are not the other's.
        """
        other = SlabArena(pin=self._may_pin, reuse=self.is_reused)
        other._slabs = [slab.emptied() for slab in self._slabs]
        return other

    def free_all(self) -> None:
        """Drops the slabs in which nothing is in use."""
        self._collect()
        self._drop_unused()

    def release(self, region: Region) -> None:
        """Gives a range back; may be called from any thread and from a finalizer."""
        lending.end_at(region.slab.data.data_ptr() + region.offset)
        self._returned.append(region)

    @callers_modes_off()
    def tensor(
        self, region: Region, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]
    ) -> Tensor:
        """Makes the tensor of an entry: its own storage, offset 0, over the region's bytes.

        The tensor keeps the slab alive; the region comes back by itself when the last tensor over
        it dies.

        Args:
            region: The entry's range, at least as large as the tensor.
            dtype: Any dtype, those without a buffer format (``float8_*``) included.
            shape: The shape; zero elements and zero dimensions are fine.
            stride: The strides of a dense layout.
        """
        count = torch.Size(shape).numel()
        # At least one element: torch.load refuses storages that are no multiple of one.
        size = max(count, 1) * dtype.itemsize
        buffer = (ctypes.c_char * size).from_address(region.slab.data.data_ptr() + region.offset)
        buffer.slab = region.slab  # type: ignore[attr-defined]  # the buffer owns what it points to
        weakref.finalize(buffer, self.release, region).atexit = False
        data = torch.frombuffer(buffer, dtype=dtype, count=max(count, 1))
        return data.as_strided(tuple(shape), tuple(stride))

    def _grow(self, wanted: int) -> Slab:
        so_far = _power_of_two_at_least(self.slab_bytes) if self._slabs else 0
        size = max(_power_of_two_at_least(wanted), min(so_far, _LARGEST_UNANNOUNCED_SLAB))
        _require_host_room(size)
        self._slabs.append(self._new_slab(size))
        return self._slabs[-1]

    def _new_slab(self, size: int) -> Slab:
        try:
            return Slab(size, pin=self.is_pinned)
        except (RuntimeError, MemoryError) as error:  # the driver's, or a limit on locked pages
            if _device.is_lost(error):
                raise
            raise RefusedError(
                f"{format_bytes(size)} of host memory could not be page-locked ({error}; "
                f"the system says that this process may lock {locked_limit()}). Nothing was "
                "changed; raise that limit (ulimit -l), keep more state on the device with "
                "`resident=`, or pass `pin=False`."
            ) from error

    def _collect(self) -> None:
        ranges: dict[Slab, list[tuple[int, int]]] = {}  # a save gives back thousands at once
        while self._returned:
            region = self._returned.popleft()
            ranges.setdefault(region.slab, []).append((region.offset, region.num_bytes))
        for slab, each in ranges.items():
            slab.put_back(each)
        if ranges and not self.is_reused:
            self._drop_unused()

    def _drop_unused(self) -> None:
        self._slabs = [s for s in self._slabs if s.free_bytes < s.num_bytes]


def another_over(tensor: Tensor, owner: object) -> tuple[Tensor, weakref.ref[Any]]:
    """Returns another tensor over a host tensor's bytes, with a storage of its own.

    Args:
        tensor: A dense one with elements.
        owner: What the new storage keeps alive, the bytes among it.

    Returns:
        The tensor, and a reference that lives as long as anything that shares its storage.
    """
    size = tensor.numel() * tensor.element_size()
    buffer = (ctypes.c_char * size).from_address(tensor.data_ptr())
    buffer.owner = owner  # type: ignore[attr-defined]  # the buffer owns what it points to
    data = torch.frombuffer(buffer, dtype=tensor.dtype, count=tensor.numel())
    # Not a view, which would keep its base: nothing but this tensor is to have the storage.
    return data.as_strided(tensor.shape, tensor.stride()).data, weakref.ref(buffer)


def is_only_one(tensor: Tensor) -> bool:
    """Returns whether nothing but a tensor has its storage: no view, no array, no other tensor."""
    return _num_owners(tensor) == _NUM_OWNERS_OF_ONE


def _num_owners(tensor: Tensor) -> int:
    # torch has no public way to ask; its own trees of CUDA graphs ask so.
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


_NUM_OWNERS_OF_ONE = _num_owners(torch.empty(1, device="cpu"))  # the asking has some, too


def _slab_sizes(entries: Sequence[int]) -> list[int]:
    """Returns sizes of slabs into which ``entries`` fit when each takes the first that has room."""
    sizes: list[int] = []
    left = list(entries)
    while left:
        total = sum(left)
        small = total <= _SMALLEST_RESERVED_SLAB
        size = _power_of_two_at_least(total) if small else _power_of_two_at_most(total)
        size = max(min(size, _LARGEST_SLAB), _power_of_two_at_least(max(left)))
        sizes.append(size)
        room, rest = size, []
        for entry in left:
            if entry <= room:
                room -= entry
            else:
                rest.append(entry)
        left = rest
    return sizes


def _require_host_room(num_bytes: int) -> None:
    if _device.is_dry():
        return
    available = available_host_bytes()
    if available is not None and num_bytes > available:
        _pinned.release_pinned_cache()  # what torch keeps for reuse counts as used
        available = available_host_bytes()
    if available is not None and num_bytes > available:
        raise RefusedError(
            f"{format_bytes(num_bytes)} of host memory are needed and {format_bytes(available)} "
            "are available (free RAM, or the cgroup's limit). Nothing was changed; keep more "
            "state on the device with `resident=`, or give the process more host memory."
        )
