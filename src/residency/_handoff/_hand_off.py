"""Makes room on a device for another user of it, proves it, and takes the device back.

Owns the arguments: everything that is wrong with them is found before anything moves.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from residency import _device
from residency._errors import InvalidArgumentError, RefusedError
from residency._handoff._agreement import check_group
from residency._handoff._hand_off_job import HandOff, sole_hand_off
from residency._handoff._peer import check_path, check_timeout
from residency._handoff._reclaim import Reclaimed
from residency._handoff._segments import expandable_segments as segments, require_settable
from residency._park import Parking, is_parked, tensors_of
from residency._units import parse_bytes


def hand_off(
    need: int | str,
    *,
    park: Iterable[object] = (),
    device: torch.device | int | str | None = None,
    timeout: float = 60.0,
    collect: bool = True,
    group: object = None,
    peer: str | os.PathLike[str] | None = None,
    expandable_segments: bool | None = None,
) -> AbstractContextManager[Reclaimed]:
    """Frees a number of bytes on the device while the body runs, and checks that they are free.

    Tries the means of `residency.reclaim` first. If bytes are still missing, parks as many listed
    objects as needed. On exit, after an exception too, exactly these objects come back.

    Args:
        need: Bytes, or a size such as ``"20GiB"``, that must be free by the device's own count.
        park: Modules and optimizers that may be moved to the host, the first ones first. An
            optimizer may be listed without its model, which then stays.
        device: The accelerator, by default the current one.
        timeout: Seconds to wait for the other process, and on exit for the bytes; twice for ranks.
        collect: Whether garbage may be collected, if a search found that it pays.
        group: Ranks that hand over together: none enters before all have their bytes, and all
            raise if one has not. A group with a host backend is best.
        peer: A path, at which another process calls `residency.take_over` and states its bytes.
        expandable_segments: Whether the body uses expandable segments; None changes nothing.

    Returns:
        A context manager. It yields the bytes that went back, by the means that freed them.

    Raises:
        HandOffError: The bytes cannot be freed, or the process that had the device at this path
            before is dead and no other asks for it: all parked objects are back. Or, on exit, the
            bytes are not free in time: the objects are complete on the host, and ``retry()`` tries
            again.
        InvalidArgumentError: A size, a device, a path or an owner is invalid.
        RefusedError: A hand-off of the device is under way, a graph is being captured, or the
            device does not tell its free bytes. Nothing was moved.

    Memory:
        No device memory. Pinned host memory for the parked bytes, kept for the next time.
    """
    return _handed_off(
        parse_bytes(need, name="need"),
        park,
        device=device,
        timeout=check_timeout(timeout),
        collect=collect,
        group=check_group(group),
        path=None if peer is None else check_path(peer),
        expandable_segments=expandable_segments,
    )


@contextmanager
def _handed_off(
    need: int,
    park: Iterable[Any],
    *,
    device: torch.device | int | str | None,
    expandable_segments: bool | None,
    **settings: Any,
) -> Iterator[Reclaimed]:
    target = _target(device)
    job = HandOff(target, need, _parkings_of(park, target), **settings)
    require_settable(target, expandable_segments)
    with sole_hand_off(target):
        try:
            freed = job.enter()
            with segments(target, expandable_segments):  # not around what comes back
                yield freed
        except BaseException as error:
            job.leave(error)
            raise
        job.leave(None)


def _parkings_of(owners: Iterable[Any], device: torch.device) -> list[Parking]:
    """Returns a parking for each listed owner, none of which has moved anything.

    Raises:
        InvalidArgumentError: An owner is listed twice, or has nothing on the device.
    """
    if isinstance(owners, nn.Module | Optimizer):
        owners = [owners]
    try:
        owners = list(owners)
    except TypeError:
        raise InvalidArgumentError(
            f"park is {reprlib.repr(owners)}; expected a list of modules and optimizers."
        ) from None
    for number, owner in enumerate(owners):
        name = f"park[{number}] ({type(owner).__name__})"
        if any(owner is other for other in owners[:number]):
            raise InvalidArgumentError(f"{name} is listed before. Nothing was moved; list it once.")
        _require_on(owner, device, name=name)
    return [Parking(owner, beside=owners) for owner in owners]


def _require_on(owner: object, device: torch.device, *, name: str) -> None:
    if not isinstance(owner, nn.Module | Optimizer):
        raise InvalidArgumentError(
            f"{name} cannot be parked; expected a module or an optimizer. Nothing was moved."
        )
    found = {tensor.device for _, tensor in tensors_of(owner)}
    elsewhere = {each for each in found if each.type != "cpu" and each != device}
    is_host_module = isinstance(owner, nn.Module) and found and not is_parked(owner)
    if elsewhere or (is_host_module and device not in found):
        devices = ", ".join(sorted(map(str, found)))
        raise InvalidArgumentError(
            f"{name} is on {devices}, and {device} is to be handed over. Nothing was moved; list "
            "owners on that device."
        )


def _target(name: torch.device | int | str | None) -> torch.device:
    device = _device.resolve(name)
    if device is None:
        raise InvalidArgumentError(
            "There is no accelerator on this machine to hand over; leave the call out here."
        )
    if _device.is_capturing(device):
        raise RefusedError(
            "The current stream is being captured into a graph. Nothing was done; hand the device "
            "over before or after the capture."
        )
    return device
