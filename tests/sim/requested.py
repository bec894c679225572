"""Bytes that tests and kernels ask the device's allocator for, before it rounds them up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


def scratch_of_backward(
    output: torch.Tensor, inputs: Sequence[torch.Tensor], gradient: torch.Tensor
) -> int:
    """Returns the requested bytes that a backward pass takes for a moment, beyond its results."""
    return scratch_of(
        lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True),
    )
