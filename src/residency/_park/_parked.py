"""Parks owners for as long as a block runs, and brings them back however it ends.

Invariant, which ``tests/park/test_parked.py`` tries to break: after the block, exactly what it
parked is back with the same bits, after an error that holds the device's memory too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from residency import _device
from residency._memory import explain, let_go_of
from residency._park._park import (
    check_gradients,
    check_owner,
    is_on_host,
    park_with,
    refuse_shared_memory,
)
from residency._park._parking import Parking
from residency._park._tensors import Gradients, Owner


def parked(
    *owners: Owner, gradients: Gradients = "move", pin: bool = True, fork_rng: bool = False
) -> AbstractContextManager[int]:
    """Keeps modules and optimizers on the host while the body runs: a preview, a validation.

    Before the body, the owners are parked as `residency.park` does, and the allocator gives its
    unused segments back. After it, also after an exception, the allocator gives the body's segments
    back, and every tensor that was parked returns with the same bits. An owner that is on the host,
    or that another call has parked, stays as it is, so blocks may nest.

    If an exception ends the body and the functions that it left still hold memory that the owners
    need, the variables of these functions are cleared. The error's text stays; a debugger no
    longer shows values.

    Args:
        owners: Modules, FSDP2 and DDP too, and optimizers, whose state is moved. Of an offloaded
            optimizer only the state that stays ``resident`` moves.
        gradients: As in `residency.park`: ``"move"`` or ``"drop"``.
        pin: Whether the host memory is page-locked.
        fork_rng: Whether torch's random numbers, the host's and the device's, go on after the body
            as if it had drawn none. For a preview that is not to change the training.

    Returns:
        A context manager. It yields the device bytes that were freed, as the allocator rounds them.

    Raises:
        InvalidArgumentError: An argument is invalid.
        RefusedError: A tensor cannot be moved, or the host has no room. All owners are as they
            were.
        torch.OutOfMemoryError: On exit: tensors that the body left on the device take the room of
            the owners. They are whole on the host; make room and call `residency.unpark` for each.

    Memory:
        Device: no more than before. Host: as for `residency.park`, kept for the next time.
    """
    for owner in owners:
        check_owner(owner, "parked")
        refuse_shared_memory(owner)
    check_gradients(gradients)
    return _parked(owners, gradients, pin, fork_rng)


@contextmanager
def _parked(
    owners: Sequence[Owner], gradients: Gradients, pin: bool, fork_rng: bool
) -> Iterator[int]:
    parkings = [
        Parking(owner, gradients=gradients, pin=pin, beside=owners)
        for owner in owners
        if not (isinstance(owner, nn.Module) and is_on_host(owner))
    ]
    try:
        freed = sum(park_with(parking) for parking in parkings)
        _give_cache_back()
        with _forked_rng() if fork_rng else nullcontext():
            yield freed
    except BaseException as error:
        explain(error)  # while the owners are away, as they were when it was raised
        _bring_back(parkings, error)
        raise
    _bring_back(parkings, None)


def _bring_back(parkings: Sequence[Parking], error: BaseException | None) -> None:
    """Brings back what is parked; an error on its way may hold the room, and has to let go."""
    _give_cache_back()
    try:
        _unpark_all(parkings)
    except torch.OutOfMemoryError:
        if error is None:
            raise
        let_go_of(error)
        _give_cache_back()
        _unpark_all(parkings)


def _unpark_all(parkings: Sequence[Parking]) -> None:
    for parking in reversed(parkings):
        parking.unpark()


def _give_cache_back() -> None:
    """Gives unused segments back, for owners that have nothing on the device too: the body's."""
    if (device := _device.accelerator()) is not None and _device.has_context(device):
        _device.empty_cache(device)


def _forked_rng() -> AbstractContextManager[None]:
    device = _device.accelerator()
    if device is None:
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[_device.current_index()], device_type=device.type)
