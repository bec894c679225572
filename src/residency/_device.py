"""Which accelerator there is, and what it can be asked.

The only file (the simulator aside) that names ``torch.cuda`` or asks torch which accelerator is
present. Everything here answers on a machine without an accelerator too: there is no device,
nothing is pinned, and every memory figure is zero.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accelerator() -> torch.device | None:
    """Returns the current accelerator with its index, or None where there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return None
    return torch.device(found.type, torch.accelerator.current_device_index())


def current_stream(device: torch.device) -> torch.Stream:
    """Returns the stream on which the calling thread's work for ``device`` runs."""
    return torch.accelerator.current_stream(device)


def new_stream(device: torch.device) -> torch.Stream:
    """Makes a stream; make few and keep them, each has an allocator pool of its own."""
    return torch.Stream(device=device)


def new_event(device: torch.device) -> torch.Event:
    """Makes a timed event that is not recorded yet; waiting on it as it is does nothing."""
    return torch.Event(device.type, enable_timing=True)


def is_pinning_available() -> bool:
    """Says whether host memory can be page-locked for an accelerator here."""
    return accelerator() is not None


def allocate_pinned(num_bytes: int) -> Tensor:
    """Allocates host bytes, page-locked where there is an accelerator.

    Memory:
        Torch rounds a page-locked allocation up to a power of two; ask for powers of two.

    Returns:
        An uninitialised ``uint8`` tensor of shape ``[num_bytes]`` on the host.
    """
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinning_available())


def release_pinned_cache() -> None:
    """Gives freed page-locked memory back to the system instead of keeping it for reuse.

    Waits for the device first: a freed block that a copy may still use is not free yet.
    """
    if accelerator() is None:
        return
    synchronize()
    release = getattr(torch.accelerator, "empty_host_cache", None)
    if release is None:  # before torch 2.12; only builds for an accelerator have it
        release = getattr(torch._C, "_host_emptyCache", None)
    if release is not None:
        release()


def memory_allocated(device: torch.device | None = None) -> int:
    """Returns the bytes that live tensors hold on the device."""
    return torch.accelerator.memory_allocated(device) if accelerator() is not None else 0


def max_memory_allocated(device: torch.device | None = None) -> int:
    """Returns the most bytes that live tensors have held since the last reset."""
    return torch.accelerator.max_memory_allocated(device) if accelerator() is not None else 0


def reset_peak(device: torch.device | None = None) -> None:
    """Starts the peak of ``max_memory_allocated`` anew; torch has one register for everybody."""
    if accelerator() is not None:
        torch.accelerator.reset_peak_memory_stats(device)


def memory_info(device: torch.device | None = None) -> tuple[int, int]:
    """Returns the free and the total bytes of the device, as the device itself counts them."""
    if accelerator() is None:
        return 0, 0
    free, total = torch.accelerator.get_memory_info(device)
    return free, total


def synchronize(device: torch.device | None = None) -> None:
    """Blocks the host until everything queued on the device has run."""
    if accelerator() is not None:
        torch.accelerator.synchronize(device)


def rng_state(device: torch.device) -> Tensor:
    """Returns the state of the device's generator, bytes on the host; waits for nothing."""
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_rng_state(state: Tensor, device: torch.device) -> None:
    """Puts the device's generator into a state that ``rng_state`` returned."""
    torch.get_device_module(device).set_rng_state(state, device)


def limit_memory(num_bytes: int, device: torch.device) -> bool:
    """Makes torch's allocator on a CUDA device refuse to hold more than ``num_bytes``.

    Returns:
        Whether a limit was set: only CUDA's allocator has one.
    """
    if device.type != "cuda":
        return False
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total), device)
    return True
