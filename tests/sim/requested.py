"""What is asked of the device's allocator, without its rounding."""

from __future__ import annotations

from collections.abc import Callable

import torch

accelerator = torch.accelerator


def requested(which: str) -> int:
    """Returns what is asked for now, `current`, or was at the most, `peak`."""
    return int(accelerator.memory_stats()[f"requested_bytes.all.{which}"])


def scratch_of(work: Callable[[], object]) -> int:
    """Returns the requested bytes that a call takes for a moment, beyond its results."""
    accelerator.reset_peak_memory_stats()
    before = requested("current")
    result = work()
    kept = requested("current") - before
    del result
    return requested("peak") - before - kept
