"""Whole free blocks of the allocator's cache, in which state stays between two steps.

A request of the size of a free block takes that block as a whole, and gives it back as one. Nothing
is split, so the run finds its own holes again: state anywhere else makes the run's next block go
into a segment of another kind, where it stays, and the reserve grows though what is allocated does
not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from residency import _device


def allocated_and_peak(device: torch.device) -> tuple[int, int]:
    """Returns the bytes that live tensors hold, and the most since the last reset, in one reading
    that takes a third of the time of ``memory_allocated``.
    """
    held: dict[str, int] = _figures(device)["allocated_bytes"]["all"]
    return held["current"], held["peak"]


def reserved_bytes(device: torch.device) -> int:
    """Returns the bytes of the allocator's segments."""
    return int(_figures(device)["reserved_bytes"]["all"]["current"])


def _figures(device: torch.device) -> Any:
    # torch.accelerator.memory_stats makes a sorted list of all figures of this one.
    return torch._C._accelerator_getDeviceStats(device.index or 0)  # type: ignore[attr-defined,unused-ignore]


def stream_of(device: torch.device, address: int) -> object:
    """Returns the allocator's name of the stream that has the segment with an address."""
    for segment in _device.memory_segments(device) or ():
        if segment["address"] <= address < segment["address"] + segment["total_size"]:
            return segment["stream"]
    return None


def free_blocks(device: torch.device, at_least: int) -> dict[int, int]:
    """Returns the sizes of the free blocks that the default stream may have, by address.

    Args:
        device: An accelerator.
        at_least: The bytes of the smallest one.
    """
    found: dict[int, int] = {}
    for segment in _device.memory_segments(device) or ():
        is_shared = tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0)
        if not is_shared or segment["stream"] != 0:
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "inactive" and block["size"] >= at_least:
                found[block.get("address", address)] = block["size"]
            address += block["size"]
    return found


def largest(sizes: Mapping[int, int], room: int) -> int | None:
    """Returns the address of the largest block that fits.

    The largest is the hole that the run's own largest tensors left, and come back to; smaller ones
    are what it needs meanwhile.
    """
    fitting = (address for address, size in sizes.items() if size <= room)
    return max(fitting, key=sizes.__getitem__, default=None)


def take(device: torch.device, address: int, num_bytes: int) -> Tensor | None:
    """Takes a free block, on the current stream; None where the allocator gives another one."""
    memory = _device.unfilled_bytes(num_bytes, device)
    return memory if memory.data_ptr() == address else None
