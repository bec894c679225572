"""What C++ holds: the allocator's blocks that no storage which Python knows begins at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import torch

from residency import _device
from residency._units import MIB, format_bytes, parse_bytes

# Torch asks cuBLAS for one of these for each thread and stream: before Hopper, and from it on.
_WORKSPACE_BYTES = parse_bytes("8320KiB")
_HOPPERS_WORKSPACE_BYTES = 32 * MIB
_HOPPER = 9
_OTHERS = (
    "a gradient or a value under way, buckets of DistributedDataParallel, buffers of a "
    "communicator or of a captured graph"
)


def describe_blocks(device: torch.device, known: Collection[int], least_bytes: int) -> str:
    """Returns what the blocks are that Python knows no tensor of; nothing where none is seen.

    Args:
        device: The accelerator.
        known: The addresses of all storages that were found.
        least_bytes: The smallest block that is counted among those that no workspace is.
    """
    sizes: Counter[int] = Counter(
        int(block["requested_size"])
        for segment in _device.memory_segments(device) or ()
        for block in segment["blocks"]
        if block["state"] == "active_allocated" and block["address"] not in known
    )
    workspace = _HOPPERS_WORKSPACE_BYTES if _is_hopper(device) else _WORKSPACE_BYTES
    count = sizes.pop(workspace, 0)
    parts = []
    if count:
        parts.append(
            f"{_blocks(count)} of {format_bytes(workspace)}, as large as cuBLAS's workspace of a "
            "stream: residency.reclaim() frees those"
        )
    others = {size: number for size, number in sizes.items() if size >= least_bytes}
    if others:
        largest = format_bytes(max(others))
        word = "other, " if count else ""
        parts.append(f"{_blocks(sum(others.values()))} {word}of at most {largest}: {_OTHERS}")
    return "; ".join(parts)


def _blocks(count: int) -> str:
    return f"{count} block{'' if count == 1 else 's'}"


def _is_hopper(device: torch.device) -> bool:
    ask: Any = getattr(torch.get_device_module(device), "get_device_capability", None)
    return ask is not None and ask(device)[0] >= _HOPPER
