"""Turns the simulated accelerator on, changes its settings, and asks it for figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from residency._errors import InvalidArgumentError, SimulatorError
from residency._units import format_bytes, parse_bytes
from residency_sim import _backend, _build
from residency_sim._clock import Clock
from residency_sim._gpus import CONTEXT_BYTES, gpu_named
from residency_sim._share import share_name

_SCHEDULES = ("late", "overtake", "eager")
_CONTEXTS = {"sim": 0, "cuda": CONTEXT_BYTES}
_MOST_DEVICES = 8  # of one machine


def enable(
    capacity: int | str | None = None,
    *,
    schedule: str = "late",
    check_races: bool = False,
    dry: bool = False,
    clock: Clock | None = None,
    share: str | None = None,
    workspaces: bool = True,
    context: int | str | None = None,
    devices: int | None = None,
    device: str | None = None,
    gpu: str | None = None,
) -> torch.device:
    """Turns the simulated accelerator on, or changes its settings, and returns its device.

    The first call on a machine compiles it (about a minute). Each lets queued work finish.

    Args:
        capacity: Bytes of device memory, as ``"24GiB"``; by default the ``gpu``'s, else 8 GiB.
        schedule: When queued work runs. ``"late"``: when something forces it, and then only the
            forced stream and its waits, so that a value that was read before it was ready is wrong.
            ``"overtake"``: when something forces it, after everything else that may legally run, so
            that a value that was overwritten early is wrong. ``"eager"``: at once.
        check_races: Raise `RaceError` if two operations on different streams touch the same
            bytes, one writing or allocating them, and no event or synchronisation orders the two.
        dry: Run kernels for their shapes only, so that a model larger than this machine's memory
            can be stepped. The values of tensors are undefined, and ``item()`` gives a placeholder.
        clock: Rates of simulated time, which events then have; without it, the host's.
        share: A name, by default ``RESIDENCY_SIM_SHARE``: processes of one name share the capacity.
        workspaces: Charge scratch memory: a cuBLAS workspace for each thread and stream, which a
            further ``enable`` frees, and buffers of split reductions. Off, tensors alone count.
        context: Bytes of the device that the process takes beside torch's from its first use of
            the device on (the driver, kernels, NCCL); as ``cuda`` the GPU's or 534 MiB, else none.
        devices: How many there are as ``cuda``, up to 8; one of them has tensors and streams.
        device: ``"sim"``, the default, or ``"cuda"``, in whose place scripts then find it. The
            first call in a process decides; for CUDA, before anything uses ``torch.cuda``.
        gpu: The GPU that it stands for, as ``"l4"``; by default an A100's kernels.

    Raises:
        InvalidArgumentError: An argument or allocator setting means nothing or cannot change now.
        SimulatorError: Another device is in the place, the shared file is unusable, or the process
            was forked from one that had used the device.
        BuildError: It cannot be built here; the message says what to install.

    Memory:
        Device memory is host memory, taken segment by segment, touched when first poisoned.
    """
    capacity_bytes = _parse_capacity(capacity, gpu)
    _check_options(schedule, clock)
    face, name = _face(device), share_name(share)
    num_devices = _parse_devices(devices, face, name)
    settings: dict[str, Any] = {"schedule": schedule, "check_races": check_races, "dry": dry}
    settings |= {"clock": clock, "workspaces": workspaces, "gpu": gpu}
    settings["context_bytes"] = context_bytes = _parse_context(context, face, gpu, capacity_bytes)
    is_new = _prepare(face, capacity_bytes, context_bytes, dry, name)
    _backend.configure(capacity_bytes, share=name, **settings)
    if is_new:  # last, so that a refused first call leaves torch as it was
        _backend.register(num_devices)
    return torch.device(face, 0)


def build(show: Callable[[str, int, int], None] | None = None) -> Path:
    """Compiles the simulated accelerator if this machine has not, and returns the library's path.

    ``enable`` does the same at its first call; an image of a container is a place to do it before.

    Args:
        show: Called with the current action, the number of steps that are done, and of all; by
            default lines on stderr say so. It is not called if nothing is to be done.

    Raises:
        BuildError: It cannot be built here; the message says what to install.
    """
    return _build.build_extension(show=show)


def is_built() -> bool:
    """Returns whether ``enable`` finds the simulated accelerator compiled for this torch.

    Raises:
        BuildError: It is not compiled, and cannot be here; the message says what to install.
    """
    return _build.is_built()


def is_enabled() -> bool:
    """Returns whether ``enable`` has registered the device in this process."""
    return _backend.is_registered()


def settings() -> dict[str, Any]:
    """Returns the settings in force as arguments, so that ``enable(**was)`` brings them back.

    Raises:
        SimulatorError: The device is not enabled.
    """
    _backend.core()
    return _backend.settings()


def pinned_memory_stats() -> dict[str, int]:
    """Returns the bytes of pinned host memory.

    ``used_bytes`` are held by tensors, ``pinned_bytes`` also count freed blocks that are kept for
    reuse, and ``registered_bytes`` are memory that ``cudaHostRegister`` pinned; each with
    ``.current`` and ``.peak``. ``num_pinned`` counts allocations that pinned
    memory.
    """
    stats: dict[str, int] = _backend.core().pinned_memory_stats()
    return stats


def reset_peak_pinned_memory_stats() -> None:
    """Starts the peaks of ``pinned_memory_stats`` anew."""
    _backend.core().reset_peak_pinned_memory_stats()


def now_seconds() -> float:
    """Returns the simulated time up to which the host has waited; 0 without a clock."""
    seconds: float = _backend.core().now_seconds()
    return seconds


def _face(device: str | None) -> str:
    present = _backend.face()
    if device is None:
        return present or "sim"
    if device not in _backend.FACES:
        raise InvalidArgumentError(
            f"device is {device!r}; expected one of {', '.join(map(repr, _backend.FACES))}."
        )
    if present not in (None, device):
        raise SimulatorError(
            f"The simulated accelerator is {present!r} in this process; one that is {device!r} "
            "needs a process of its own: start one, and enable it there."
        )
    return device


def _parse_capacity(capacity: int | str | None, gpu: str | None) -> int:
    if capacity is None:
        capacity = "8GiB" if gpu is None else gpu_named(gpu)[1].capacity
    capacity_bytes = parse_bytes(capacity, name="capacity")
    if capacity_bytes == 0:
        raise InvalidArgumentError("capacity is 0; expected a device with room for something.")
    return capacity_bytes


def _parse_context(
    context: int | str | None, face: str, gpu: str | None, capacity_bytes: int
) -> int:
    if context is None:
        context = _CONTEXTS[face] if gpu is None or face != "cuda" else gpu_named(gpu)[1].context
    context_bytes = parse_bytes(context, name="context")
    if context_bytes >= capacity_bytes:
        raise InvalidArgumentError(
            f"context is {format_bytes(context_bytes)}, and capacity {format_bytes(capacity_bytes)}"
            "; expected room for something beside it: more capacity, or context='0B'."
        )
    return context_bytes


def _parse_devices(devices: int | None, face: str, share: str | None) -> int:
    present = _backend.core().num_devices() if _backend.is_registered() else None
    wanted: int = (present or 1) if devices is None else devices
    if isinstance(wanted, bool) or not isinstance(wanted, int) or not 1 <= wanted <= _MOST_DEVICES:
        raise InvalidArgumentError(f"devices is {devices!r}; expected 1 to {_MOST_DEVICES}.")
    if wanted > 1 and face != "cuda":
        raise InvalidArgumentError(
            f"devices is {wanted}; several are modelled as 'cuda' alone: pass device='cuda'."
        )
    if wanted > 1 and share is not None:
        raise InvalidArgumentError(
            f"devices is {wanted} and share {share!r}, which is of one device; expected one of the "
            "two."
        )
    if present not in (None, wanted):
        raise SimulatorError(
            f"devices is {wanted}, and this process has {present}; start another one for it."
        )
    return wanted


def _check_options(schedule: str, clock: Clock | None) -> None:
    if clock is not None:
        if not isinstance(clock, Clock):
            raise InvalidArgumentError(f"clock is {clock!r}; expected a sim.Clock, or None.")
        clock.rates()  # refused now if they mean nothing
    if schedule not in _SCHEDULES:
        raise InvalidArgumentError(
            f"schedule is {schedule!r}; expected one of {', '.join(map(repr, _SCHEDULES))}."
        )


def _prepare(
    face: str, capacity_bytes: int, context_bytes: int, dry: bool, share: str | None
) -> bool:
    """Loads the device, or checks that its settings can change; returns whether it is new."""
    is_new = not _backend.is_registered()
    if is_new:
        _backend.load(face)
    else:
        _check_change(capacity_bytes, context_bytes, dry, share)
    return is_new


def _check_change(capacity_bytes: int, context_bytes: int, dry: bool, share: str | None) -> None:
    _backend.check_process()
    core = _backend.core()
    index = core.machine_index()
    if index < 0 or not core.has_context(index):
        return  # nothing is in use, and no question makes a context
    core.recover()
    torch.accelerator.synchronize(index)
    core.clear_workspaces()
    room = capacity_bytes - context_bytes
    reserved = torch.accelerator.memory_reserved(index)
    joins = share not in (None, _backend.share())  # only what is in use goes along
    if room < reserved or joins:
        torch.accelerator.empty_cache()
        reserved = torch.accelerator.memory_reserved(index)
    if room < reserved:
        beside = f" beside a context of {format_bytes(context_bytes)}" if context_bytes else ""
        raise InvalidArgumentError(
            f"capacity is {format_bytes(capacity_bytes)}, and {format_bytes(reserved)} are in use"
            f"{beside}; free tensors first or ask for more."
        )
    allocated = torch.accelerator.memory_allocated(index)
    if dry != _backend.is_dry() and allocated > 0:
        raise InvalidArgumentError(
            f"dry is {dry}, and {format_bytes(allocated)} of tensors were made with dry={not dry}; "
            "free them before the mode changes."
        )
