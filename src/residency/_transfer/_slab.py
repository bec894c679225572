"""Page-locked host memory, a few large allocations shared by many tensors.

A slab is one allocation whose size is a power of two, because torch's pinned allocator rounds up to
one. An arena packs entries into slabs; each entry becomes a tensor with a storage of its *own* at
offset 0, so that ``torch.save`` of one state writes that state and not the slab, and so that alias
detection sees no sharing. Invariant: the ranges of live entries never overlap, and a range is used
again only when no tensor over it is left.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from residency import _device
from residency._errors import RefusedError
from residency._transfer._host_memory import available_host_bytes
from residency._units import MIB, format_bytes, parse_bytes

# The caching allocator's own granularity: an entry lies in a slot as it would lie in an allocation.
ALIGNMENT = 512
_LARGEST_UNANNOUNCED_SLAB = 64 * MIB
_LARGEST_SLAB = parse_bytes("1GiB")


def align_up(num_bytes: int) -> int:
    """Returns the bytes that an entry of ``num_bytes`` takes in a slab or a slot."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _power_of_two_at_least(num_bytes: int) -> int:
    return 1 << max(num_bytes - 1, 0).bit_length()


def _power_of_two_at_most(num_bytes: int) -> int:
    return 1 << (num_bytes.bit_length() - 1)


class Slab:
    """Is one page-locked host allocation.

    Attributes:
        data: ``uint8`` of shape ``[num_bytes]``. Copies are issued from it, not from the views,
            because torch's pinned allocator knows only its own tensors and keeps freed ones until
            copies ended.
    """

    __slots__ = ("_free", "data")

    def __init__(self, num_bytes: int) -> None:
        self.data = _device.allocate_pinned(num_bytes)
        self._free = [(0, num_bytes)]

    @property
    def num_bytes(self) -> int:
        return self.data.numel()

    @property
    def free_bytes(self) -> int:
        return sum(size for _, size in self._free)

    def take(self, num_bytes: int) -> int | None:
        """Takes the first free range that is large enough; returns its offset, or None."""
        for index, (offset, size) in enumerate(self._free):
            if size >= num_bytes:
                rest = (offset + num_bytes, size - num_bytes)
                self._free[index : index + 1] = [rest] if rest[1] else []
                return offset
        return None

    def put_back(self, offset: int, num_bytes: int) -> None:
        """Frees a range and merges it with its free neighbours."""
        merged: list[tuple[int, int]] = []
        for start, size in sorted([*self._free, (offset, num_bytes)]):
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((start, size))
        self._free = merged


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Is the range of one entry: ``num_bytes`` is a multiple of ``ALIGNMENT``."""

    slab: Slab
    offset: int
    num_bytes: int


class SlabArena:
    """Packs entries into slabs that it allocates as they are needed."""

    def __init__(self) -> None:
        self._slabs: list[Slab] = []
        self._announced_bytes = 0
        # Ranges come back from finalizers, at any moment and on any thread: only append here.
        self._returned: deque[Region] = deque()

    @property
    def pinned_bytes(self) -> int:
        """Returns the bytes of all slabs."""
        self._collect()
        return sum(slab.num_bytes for slab in self._slabs)

    @property
    def used_bytes(self) -> int:
        """Returns the bytes of all live entries, each rounded up to ``ALIGNMENT``."""
        return self.pinned_bytes - sum(slab.free_bytes for slab in self._slabs)

    def reserve(self, total_bytes: int) -> None:
        """Announces how many bytes of entries there will be in all, each rounded up to
        ``ALIGNMENT``.

        Slabs are then sized as the sum of powers of two that makes up the announced total, so that
        the page-locked bytes exceed the entries only by what is left at the end of each slab.

        Raises:
            RefusedError: The host has no room for the part that is not allocated yet.
        """
        missing = total_bytes - self.pinned_bytes
        if missing > 0:
            _require_host_room(missing)
        self._announced_bytes = align_up(total_bytes)

    def prime(self) -> None:
        """Allocates the slabs for everything announced now, rather than at the first use.

        Raises:
            RefusedError: The host has no room, or memory cannot be page-locked; slabs that were
                allocated before stay for the next use.
        """
        while (missing := self._announced_bytes - self.pinned_bytes) > 0:
            self._add_slab(min(_power_of_two_at_most(missing), _LARGEST_SLAB))

    def allocate(self, num_bytes: int) -> Region:
        """Returns a range for an entry; give it back with ``release``, or never after ``tensor``.

        Raises:
            RefusedError: A new slab is needed and the host has no room for it, or it cannot be
                page-locked.
        """
        self._collect()
        wanted = align_up(max(num_bytes, 1))
        for slab in self._slabs:
            offset = slab.take(wanted)
            if offset is not None:
                return Region(slab, offset, wanted)
        slab = self._grow(wanted)
        offset = slab.take(wanted)
        assert offset is not None
        return Region(slab, offset, wanted)

    def release(self, region: Region) -> None:
        """Gives a range back; may be called from any thread and from a finalizer."""
        self._returned.append(region)

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
        size = max(count * dtype.itemsize, 1)
        buffer = (ctypes.c_char * size).from_address(region.slab.data.data_ptr() + region.offset)
        buffer.slab = region.slab  # type: ignore[attr-defined]  # the buffer owns what it points to
        weakref.finalize(buffer, self.release, region).atexit = False
        data = torch.frombuffer(buffer, dtype=torch.uint8, count=size)
        if count == 0:
            # An empty view must not share the byte that keeps the buffer alive with a real element.
            return data[:0].view(dtype).as_strided(tuple(shape), tuple(stride))
        if dtype is not torch.uint8:
            data = torch.frombuffer(buffer, dtype=dtype, count=count)
        return data.as_strided(tuple(shape), tuple(stride))

    def _grow(self, wanted: int) -> Slab:
        size = _power_of_two_at_least(wanted)
        missing = self._announced_bytes - self.used_bytes
        if missing > 0:
            size = max(size, min(_power_of_two_at_most(missing), _LARGEST_SLAB))
        elif self._slabs and self._announced_bytes == 0:
            so_far = _power_of_two_at_least(self.pinned_bytes)
            size = max(size, min(so_far, _LARGEST_UNANNOUNCED_SLAB))
        return self._add_slab(size)

    def _add_slab(self, size: int) -> Slab:
        _require_host_room(size)
        try:
            slab = Slab(size)
        except (RuntimeError, MemoryError) as error:  # the driver's, or a limit on locked pages
            raise RefusedError(
                f"{format_bytes(size)} of host memory could not be page-locked ({error}). Nothing "
                "was changed; give the process more memory that it may lock (ulimit -l), or keep "
                "more state on the device with `resident=`."
            ) from error
        self._slabs.append(slab)
        return slab

    def _collect(self) -> None:
        collected = False
        while self._returned:
            region = self._returned.popleft()
            region.slab.put_back(region.offset, region.num_bytes)
            collected = True
        if collected:
            self._slabs = [s for s in self._slabs if s.free_bytes < s.num_bytes]


def _require_host_room(num_bytes: int) -> None:
    available = available_host_bytes()
    if available is not None and num_bytes > available:
        raise RefusedError(
            f"{format_bytes(num_bytes)} of host memory are needed and {format_bytes(available)} "
            "are available (free RAM, or what the cgroup leaves). Nothing was changed; keep more "
            "state on the device with `resident=`, or give the process more host memory."
        )
