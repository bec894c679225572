"""The allocator of the simulated device with settings, and the sizes that its rules name."""

from __future__ import annotations

import gc
import time

import torch

from residency import sim

KIB = 1 << 10
MIB = 1 << 20
GRANULE = 512
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
DEFAULTS = (
    "expandable_segments:False,large_segment_size_mb:20,max_non_split_rounding_mb:20,"
    "per_process_memory_fraction:1.0"
)
accelerator = torch.accelerator


def start(capacity: int, settings: str = "") -> None:
    """Empties the device and gives it a capacity and settings, the rest as torch has them."""
    gc.collect()
    accelerator.empty_cache() if sim.is_enabled() else sim.enable()
    sim.enable()
    torch.sim.set_allocator_settings(DEFAULTS)
    torch.sim.set_allocator_settings(settings)
    accelerator.synchronize()
    accelerator.empty_cache()
    assert accelerator.memory_reserved() == 0, "an earlier test left tensors behind"
    sim.enable(capacity)
    accelerator.reset_peak_memory_stats()
    accelerator.reset_accumulated_memory_stats()


def collected_bytes() -> int:
    """Returns what tensors hold after a collection, which does nothing while another one runs."""
    gc.collect()
    return accelerator.memory_allocated()


def check_empty() -> None:
    """Checks that no tensor is left: a thread of autograd's lets go a moment after its pass."""
    deadline = time.monotonic() + 30
    while collected_bytes() and time.monotonic() < deadline:
        time.sleep(0.01)
    accelerator.empty_cache()
    assert accelerator.memory_allocated() == 0, "an earlier test left tensors behind"


def take_defaults() -> None:
    """Enables the device as tests find it, which nothing that a dry test left may hold."""
    torch.sim.clear_workspaces()
    check_empty()
    sim.enable()


def empty(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="sim")


def stat(name: str) -> int:
    return int(accelerator.memory_stats()[name])
