"""Memory of private pools, those of captured graphs among them, as torch tells of it.

Before torch 2.13 the figures of CUDA's allocator name no pools: there the segments are gone
through, or what was not seen is called unknown, never nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch

from residency import _device


def free_bytes(
    device: torch.device, figures: Mapping[str, Any], *, walk: bool
) -> tuple[int, int] | None:
    """Returns the bytes that private pools keep free: in whole segments, and beside live blocks.

    Args:
        device: The accelerator.
        figures: Its `allocator_figures`, which say whether there are private pools.
        walk: Go through all segments if there may be; on CUDA milliseconds for thousands of blocks.

    Returns:
        Both figures, or None where there may be private pools whose segments were not seen.
    """
    if not _reported_pool_bytes(figures) and _tells_pools(device):
        return 0, 0
    segments = _private_segments(device) if walk else None
    if segments is None:
        return None
    whole = beside = 0
    for segment in segments:
        free = segment["total_size"] - segment["active_size"]
        is_whole = segment["active_size"] == 0 and not segment.get("is_expandable", False)
        whole, beside = whole + free * is_whole, beside + free * (not is_whole)
    return whole, beside


def reserved_bytes(device: torch.device, figures: Mapping[str, Any]) -> int:
    """Returns what private pools, of captured graphs or a ``MemPool``, have reserved.

    Goes through all segments where torch's figures tell of no pools.

    Args:
        device: The accelerator.
        figures: Its `allocator_figures`.
    """
    reported = _reported_pool_bytes(figures)
    if reported or _tells_pools(device):
        return reported
    return sum(segment["total_size"] for segment in _private_segments(device) or ())


def _reported_pool_bytes(figures: Mapping[str, Any]) -> int:
    return sum(
        int(value)
        for name, value in figures.items()
        if name.startswith("reserved_bytes_by_private_pools") and name.endswith("all.current")
    )


def _tells_pools(device: torch.device) -> bool:
    """Returns whether torch's figures name private pools: CUDA's do from torch 2.13 on."""
    if device.type != "cuda":
        return True
    nested = torch.get_device_module(device).memory_stats_as_nested_dict(device)
    return not nested or "reserved_bytes_by_private_pools" in nested


def _private_segments(device: torch.device) -> list[dict[str, Any]] | None:
    """Returns a device's segments that belong to private pools; None where they are not shown."""
    segments = _device.memory_segments(device)
    if segments is None:
        return None
    return [segment for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0)]


def may_have_graphs() -> bool:
    """Returns whether a captured graph may be alive on any device of the process.

    Torch tells which memory belongs to pools, and a graph may have been captured without one.
    """
    present = _device.accelerator()
    if present is None:
        return False
    for index in range(torch.accelerator.device_count()):
        device = torch.device(present.type, index)
        if reserved_bytes(device, _device.allocator_figures(device)):
            return True
    graph = getattr(torch.get_device_module(present), "CUDAGraph", None)
    return graph is not None and any(type(thing) is graph for thing in gc.get_objects())
