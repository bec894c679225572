"""What the bytes of a device are: held, returnable, stuck, draining, pooled, outside or free.

One reading of the allocator and one of the device make a `MemoryState`. Where the allocator tells
everything, the classes are a partition: they sum to the capacity, to the byte. Where it does not,
the state says which figure is a bound and why. Taking one allocates nothing on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from residency import _device, _private_pools
from residency._memory._segments import SMALL_SEGMENT_BYTES
from residency._units import format_bytes

_NO_SEGMENTS = (
    "the allocator's memory grows in pages (expandable_segments) or has no segments, and which "
    "free bytes lie beside live ones is not known: returnable is at most this"
)
_UNSEEN_POOLS = (
    "private pools were not walked: the free bytes in them are counted as returnable, "
    "which is at most this"
)
_NO_ROOM = "the backend does not tell the device's free bytes: capacity is torch's reserved bytes"
_UNUSED = "torch has allocated nothing in this process yet, and the device was not asked"
_NO_DEVICE = "there is no accelerator"
_MEANINGS = {
    "held": "allocated to live tensors",
    "returnable": "whole free segments: empty_cache gives them back",
    "stuck": "free, in segments that live tensors share",
    "draining": "freed, waiting for a stream",
    "pooled": "free, kept by private pools (graphs)",
    "outside": "used on the device, not by this process's torch",
    "free": "free on the device",
    "capacity": "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryState:
    """The uses of the bytes of a device at one moment.

    Attributes:
        held: Bytes allocated to live tensors, as the allocator rounds them.
        returnable: Whole free segments, which ``empty_cache`` gives back now; an upper bound if
            `is_returnable_exact` is false.
        stuck: Free bytes in segments that something else still uses; None if the allocator tells no
            segments.
        draining: Freed bytes that a stream may still use; ``empty_cache`` waits for this stream.
        pooled: Free bytes that private pools (graphs, ``MemPool``) keep for themselves.
        outside: Used on the device, but not by this process's torch allocator.
        free: Free on the device, for every process.
        capacity: All bytes of the device.
        device: The device, or None if there is none.
        peak_held: The most that live tensors have held since torch's register was last reset.
        peak_reserved: The most that the allocator has reserved since then.
        num_retries: Allocations that succeeded only after the cache had been flushed.
        num_out_of_memory: Allocations that failed.
        is_returnable_exact: Whether `returnable` is exact and not an upper bound.
        notes: The figures that could not be measured, and why.
    """

    held: int
    returnable: int
    stuck: int | None
    draining: int
    outside: int
    free: int
    capacity: int
    pooled: int = 0
    device: str | None = None
    peak_held: int = 0
    peak_reserved: int = 0
    num_retries: int = 0
    num_out_of_memory: int = 0
    is_returnable_exact: bool = True
    notes: tuple[str, ...] = ()

    @property
    def reserved(self) -> int:
        """The bytes that the allocator has from the device, used or not."""
        return self.held + self.returnable + (self.stuck or 0) + self.draining + self.pooled

    def classes(self) -> dict[str, int | None]:
        """Returns the classes by name; they sum to the capacity."""
        return {
            "held": self.held,
            "returnable": self.returnable,
            "stuck": self.stuck,
            "draining": self.draining,
            "pooled": self.pooled,
            "outside": self.outside,
            "free": self.free,
        }

    def as_dict(self) -> dict[str, Any]:
        """Returns every field by name, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # of a notebook
        printer.text(str(self))

    def _lines(self) -> Iterator[str]:
        yield f"memory of {self.device or 'no device'}"
        for name, num_bytes in {**self.classes(), "capacity": self.capacity}.items():
            if name == "pooled" and not num_bytes:
                continue
            size = "unknown" if num_bytes is None else format_bytes(num_bytes)
            share = ""
            if num_bytes is not None and self.capacity:
                share = f"{num_bytes / self.capacity:.1%}"
            bound = "<=" if name == "returnable" and not self.is_returnable_exact else "  "
            yield f"  {name:<11}{bound}{size:>12}{share:>8}  {_MEANINGS[name]}".rstrip()
        for note in self.notes:
            yield f"  note: {note}"


def memory_state(device: torch.device | int | str | None = None) -> MemoryState:
    """Says how each byte of a device is used now.

    Waits for nothing: tensors of work that is still queued have been allocated already, and bytes
    that were freed while a stream still used them are `draining`.

    Args:
        device: The accelerator, by default the current one. If there is none at all and none is
            named, every figure is zero.

    Raises:
        InvalidArgumentError: No such accelerator is on this machine.
        torch.AcceleratorError: The device is lost, for example after an index out of bounds.
    """
    return measure(_device.resolve(device), walk_pools=True)


def measure(device: torch.device | None, *, walk_pools: bool = False) -> MemoryState:
    """Takes a state of a device that is known to be there: one reading of each of both sources.

    Args:
        device: What `_device.resolve` returned.
        walk_pools: Look at every segment if there are private pools, which takes long on CUDA.
    """
    if device is None:
        return _empty(None, _NO_DEVICE)
    figures = _device.allocator_figures(device)
    if not figures:
        return _empty(device, _UNUSED)
    pools = _private_pools.free_bytes(device, figures, walk=walk_pools)
    return _classify(device, figures, _device.device_room(device), pools)


def _empty(device: torch.device | None, note: str) -> MemoryState:
    name = None if device is None else str(device)
    return MemoryState(
        held=0,
        returnable=0,
        stuck=0,
        draining=0,
        outside=0,
        free=0,
        capacity=0,
        device=name,
        notes=(note,),
    )


def _classify(
    device: torch.device,
    figures: Mapping[str, Any],
    room: tuple[int, int] | None,
    pools: tuple[int, int] | None,
) -> MemoryState:
    def figure(name: str, kind: str = "all.current") -> int:
        return int(figures.get(f"{name}.{kind}", 0))

    reserved, held = figure("reserved_bytes"), figure("allocated_bytes")
    draining = max(0, figure("active_bytes") - held)
    stuck = figure("inactive_split_bytes")
    whole, beside = pools or (0, 0)
    free, capacity = room or (0, reserved)
    notes = [_UNSEEN_POOLS] * (pools is None) + [_NO_ROOM] * (room is None)
    has_segments = not _grows_in_pages(figures)
    if has_segments:
        # `inactive_split` counts what lies beside live blocks in private pools, too.
        returnable = reserved - held - draining - stuck - whole
        stuck -= beside
    else:
        returnable = reserved - held - draining - whole - beside
        notes.append(_NO_SEGMENTS)
    return MemoryState(
        held=held,
        returnable=max(0, returnable),
        stuck=max(0, stuck) if has_segments else None,
        draining=draining,
        pooled=whole + beside,
        # Both sources are read at moments of their own, between which other processes go on.
        outside=max(0, capacity - free - reserved),
        free=free,
        capacity=capacity,
        device=str(device),
        peak_held=figure("allocated_bytes", "all.peak"),
        peak_reserved=figure("reserved_bytes", "all.peak"),
        num_retries=int(figures.get("num_alloc_retries", 0)),
        num_out_of_memory=int(figures.get("num_ooms", 0)),
        is_returnable_exact=has_segments and pools is not None,
        notes=tuple(notes),
    )


def _grows_in_pages(figures: Mapping[str, object]) -> bool:
    """Returns whether reserved bytes may lie outside segments: those that grow are not counted."""
    if _has_uncounted(figures):
        return True
    # Plain segments from before the setting may hide those that came after it.
    large = figures.get("reserved_bytes.large_pool.current", 0)
    return bool(large) and "expandable_segments:True" in _device.allocator_settings()


def has_growing_segments(device: torch.device) -> bool | None:
    """Returns whether segments of the allocator's are seen to grow; None where it has none yet."""
    figures = _device.allocator_figures(device)
    if not figures.get("reserved_bytes.all.current", 0):
        return None
    return _has_uncounted(figures)


def _has_uncounted(figures: Mapping[str, Any]) -> bool:
    small = int(figures.get("reserved_bytes.small_pool.current", 0))
    num_small = int(figures.get("segment.small_pool.current", 0))
    large = int(figures.get("reserved_bytes.large_pool.current", 0))
    num_large = int(figures.get("segment.large_pool.current", 0))
    return small != num_small * SMALL_SEGMENT_BYTES or (large > 0 and not num_large)
