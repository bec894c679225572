"""Moves many tensors to a device at once: copies on the h2d lane, and one wait for all of them.
What no lane carries is copied here, too.

Invariant, which ``tests/optim/test_moves.py`` tries to break: whatever ends a move, no copy is
under way any more into or out of what its caller drops.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from residency._dtensor import local_of, moved, wrapped_like
from residency._modes import callers_modes_off
from residency._storages import is_dense
from residency._transfer._mover import Move, Mover


def moved_at_once(tensors: Sequence[Tensor], device: torch.device, *, copy: bool) -> list[Tensor]:
    """Returns ``moved`` for each tensor; blocks the host until all of them are there.

    Raises:
        torch.OutOfMemoryError: The device has no room for all of them; nothing was copied to it.

    Memory:
        The bytes of the tensors on ``device``.
    """
    is_carried = [_is_carried(local_of(tensor), device) for tensor in tensors]
    targets = [
        _like(tensor, device) if carried else None
        for tensor, carried in zip(tensors, is_carried, strict=True)
    ]
    _carry(
        [
            (target, local_of(tensor).detach())
            for target, tensor in zip(targets, tensors, strict=True)
            if target is not None
        ],
        device,
    )
    return [
        moved(tensor, device, copy=copy) if target is None else wrapped_like(target, tensor)
        for target, tensor in zip(targets, tensors, strict=True)
    ]


def copy_across(target: Tensor, source: Tensor) -> None:
    """Copies a tensor into another, wherever each of them is, on the current stream.

    Where one of them is on the host, the bytes are there when this returns.
    """
    target.copy_(source)


def _is_carried(local: Tensor, device: torch.device) -> bool:
    """Returns whether a copy is one range of bytes from the host to the device."""
    is_upwards = local.is_cpu and device.type != "cpu"
    return is_upwards and local.numel() > 0 and is_dense(local)


@callers_modes_off()
def _like(tensor: Tensor, device: torch.device) -> Tensor:
    local = local_of(tensor)
    return torch.empty_like(local, device=device, memory_format=torch.preserve_format)


@callers_modes_off()
def _carry(copies: Sequence[Move], device: torch.device) -> None:
    """Makes these moves, and waits for them."""
    if not copies:
        return
    mover = Mover(device)
    mover.follow_to_device()
    try:
        flight = mover.to_device(copies)
        mover.land(flight)
        flight.wait()  # the sources' memory goes after this
    except BaseException:
        mover.settle()
        raise
