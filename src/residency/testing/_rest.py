"""Brings the device to rest: what was queued has run, and what is free has been given back.

Queued work that fails does so when something forces it to run, one failure at a time, and what is
queued behind it is still there. So work is finished in a loop, which ends: no work queues more.
"""

from __future__ import annotations

import gc

import torch

from residency import _device, _pinned, _private_pools, sim
from residency._errors import QueuedWorkError

# The simulator drops an operation that failed, so that each try gets further, and where it is lost
# as CUDA's is, it can be had again. A real device repeats its first failure for good.
_MOST_FAILURES_SIMULATED = 100_000  # each wait raises one; a test that queues more is a loop
_MOST_FAILURES_REAL = 3  # a real device that failed fails every call from then on


def settle() -> int:
    """Brings the accelerator to rest and returns the bytes that tensors still hold.

    Lets queued work finish, drops garbage that holds device memory, gives cached memory back, of
    the device and pinned, and starts peaks and other statistics anew. Does nothing if there is no
    accelerator.

    Raises:
        QueuedWorkError: Queued work failed; raised when all of it has run.
    """
    failures = finish_work()
    held_bytes = give_back()
    if failures:
        raise queued_work_error("before this call", failures)
    return held_bytes


def finish_work() -> list[Exception]:
    """Lets all queued work run, past operations that fail, and returns their failures."""
    device = _device.accelerator()
    if device is None:
        return []
    is_simulated = _device.is_simulated()
    most = _MOST_FAILURES_SIMULATED if is_simulated else _MOST_FAILURES_REAL
    failures: list[Exception] = []
    while len(failures) < most:
        try:
            _device.synchronize(device)  # raises the errors of queued work, one a time
        except Exception as error:
            failures.append(error.with_traceback(None))  # whose frames would keep tensors alive
            if is_simulated and _device.is_lost(error):
                sim.enable(**sim.settings())
        else:
            break
    return failures


def queued_work_error(when: str, failures: list[Exception]) -> QueuedWorkError:
    """Makes the error that tells of the first failure and of how many there were."""
    first = failures[0]
    count = f" (the first of {len(failures)} failures)" if len(failures) > 1 else ""
    error = QueuedWorkError(
        f"Work that was queued {when} failed when it ran{count}: {type(first).__name__}: {first}\n"
        "torch.accelerator.synchronize() after the lines that may have queued it raises it there."
    )
    error.__cause__ = first
    return error


def allocated_bytes_at_rest(enough_bytes: int) -> int:
    """Returns the bytes that tensors hold: where those are more than enough, or a private pool has
    memory, without garbage, and without the workspaces that matrix products keep unless a captured
    graph may use them.
    """
    device = _device.accelerator()
    if device is None:
        return 0
    allocated_bytes = _device.memory_allocated()
    pooled_bytes = _private_pools.reserved_bytes(device, _device.allocator_figures(device))
    if allocated_bytes > enough_bytes or pooled_bytes:
        _device.finish_backward(device)
        gc.collect()
        if not _private_pools.may_have_graphs():
            _device.clear_workspaces(device)
        allocated_bytes = _device.memory_allocated()
    return allocated_bytes


def give_back() -> int:
    """Gives back what is free and starts statistics anew; returns the bytes that tensors hold."""
    if _device.accelerator() is None:
        return 0
    held_bytes = allocated_bytes_at_rest(0)
    torch.accelerator.empty_cache()
    _pinned.release_pinned_cache()
    torch.accelerator.reset_peak_memory_stats()
    torch.accelerator.reset_accumulated_memory_stats()
    if str(_device.accelerator()) == "sim:0":  # a type that torch knows only where it is enabled
        sim.reset_peak_pinned_memory_stats()
    return held_bytes
