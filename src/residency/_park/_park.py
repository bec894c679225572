"""Parks what is not used for a while: a module's or an optimizer's bytes go to the host and back.

[Note: parking for a hand-off] ``Parking`` (in ``_parking.py``) is what a hand-off builds on, one
for each owner in its list, made anew for each hand-off:

- ``Parking(owner, gradients="move", pin=True)``: owner is a module or an optimizer, offloaded too;
- ``num_bytes_on_device``: what parking it would free now; 0 where nothing is there;
- ``num_bytes_shared``: what would stay, because other code holds the same storages;
- ``park(up_to=None) -> int``: frees at least so many bytes if it can, returns how many; again later
  for more; raises ``RefusedError`` with nothing changed;
- ``unpark() -> int``: brings back exactly what this object has parked; after an out-of-memory error
  everything is whole on the host, and it may be called again;
- ``is_parked``: whether there is anything to bring back;
- ``device``: where it was, None before anything was found on a device.
"""

from __future__ import annotations

import weakref

from torch import nn
from torch.optim import Optimizer

from residency import _device, _private_pools
from residency._errors import InvalidArgumentError, RefusedError, warn
from residency._park._parking import Parking
from residency._park._tensors import Gradients, Owner, tensors_of
from residency._units import format_bytes, parse_bytes

_parkings: weakref.WeakKeyDictionary[Owner, list[Parking]] = weakref.WeakKeyDictionary()


def park(
    module: Owner,
    *,
    need: int | str | None = None,
    gradients: Gradients = "move",
    pin: bool = True,
) -> int:
    """Moves a module's parameters, buffers and gradients to the host, in place.

    Call ``unpark`` with the same object. A part of a parked module cannot be unparked alone. A part
    that was parked before its module must be unparked by a call of its own.

    Parameters stay the same objects, with their hooks, and keys of optimizers. Tensors that share a
    storage share it on the host. The host waits until the bytes are there, so every thread and
    stream may read them. An owner that is parked already stays as it is. If other code holds the
    same storage (a state dict, a flat buffer), it stays on the device, with a warning: its bytes
    would not be freed, and the tie would be cut.

    Args:
        module: A module, FSDP2 and DDP too, or an optimizer, whose state is moved; of an offloaded
            one, the state that stays ``resident``.
        need: Park only so many device bytes, as whole storages: bytes, or a string such as
            ``"2GiB"``. None parks everything, empty tensors too; so does a number that needs all
            bytes.
        gradients: ``"move"`` them with the rest, or ``"drop"`` them, as
            ``zero_grad(set_to_none=True)`` does.
        pin: Whether the host memory is page-locked.

    Returns:
        The device bytes that were freed, as the allocator rounds them. If a save in flight still
        reads some bytes, they are freed when it has seen that its copies are done.

    Raises:
        InvalidArgumentError: An argument is invalid.
        RefusedError: The module is on the host, was parked with another object, is on several
            devices or has a tensor that cannot be moved; or the host has no room, or shares its
            memory with the device. Nothing moved.

    Memory:
        Device: no more than before. Host: the bytes of the storages, each rounded up to 512,
        in slabs whose sizes are powers of two. They stay with the module for its next parking.
    """
    check_owner(module, "park")
    need_bytes = None if need is None else parse_bytes(need, name="need")
    check_gradients(gradients)
    if isinstance(module, nn.Module) and not is_parked(module) and is_on_host(module):
        raise RefusedError(f"this {type(module).__name__} {_reason(module)}")
    refuse_shared_memory(module)
    return park_with(Parking(module, gradients=gradients, pin=pin), need_bytes)


def unpark(module: Owner) -> int:
    """Brings back to the device the tensors that ``park`` moved for this owner, and no others.

    Args:
        module: The very object that was given to ``park``. With a part of it, or a module that
            contains it, only tensors that were parked with that part or module come back.

    Returns:
        The device bytes that it takes, as the allocator rounds them; 0 if it has nothing parked.

    Raises:
        InvalidArgumentError: It is neither a module nor an optimizer.
        torch.OutOfMemoryError: The device has no room. The rest is whole on the host; make room and
            call again.

    Memory:
        Device: the bytes that were freed. Host: no more than was in use; the slabs stay with the
        module for its next parking.
    """
    check_owner(module, "unpark")
    total = 0
    parkings = _parkings.get(module, [])
    while parkings:
        total += parkings[-1].unpark()
        parkings.pop()
    return total


def park_with(parking: Parking, need_bytes: int | None = None) -> int:
    """Parks what `unpark` is to know of, whatever stops it; warns of bytes that stay."""
    owner = parking.owner
    remember(parking)
    freed = parking.park(need_bytes)
    _warn_of_graphs(parking)
    shared = parking.num_bytes_shared
    if shared and (need_bytes is None or freed < need_bytes):
        warn(
            f"{format_bytes(shared)} of this {type(owner).__name__} stay on the device: other "
            "code holds the same storages. residency.holders() names it.",
        )
    return freed


def check_gradients(gradients: object) -> None:
    """Refuses what ``gradients`` cannot be."""
    if gradients not in ("move", "drop"):
        raise InvalidArgumentError(f"gradients is {gradients!r}; expected 'move' or 'drop'.")


def refuse_shared_memory(owner: Owner) -> None:
    """Refuses a device that has no memory of its own."""
    if (device := _device.accelerator()) is not None and _device.has_context(device):
        _device.refuse_shared_memory(device, f"parking this {type(owner).__name__}")


def is_on_host(module: nn.Module) -> bool:
    """Returns whether a module has tensors, and all of them are on the host."""
    tensors = [tensor for _, tensor in tensors_of(module)]
    return bool(tensors) and all(tensor.is_cpu for tensor in tensors)


def _reason(module: nn.Module) -> str:
    """Says why a module is on the host, and what brings it back, if anything does."""
    tensors = [tensor for _, tensor in tensors_of(module)]
    for owner, parkings in list(_parkings.items()):
        if any(parking.has_parked(tensor) for parking in parkings for tensor in tensors):
            return (
                f"is on the host already: it was parked with a {type(owner).__name__} that has its "
                f"tensors. Nothing moved; call residency.unpark with that {type(owner).__name__}."
            )
    return "is on the host, which has nothing to free. Nothing moved."


def _warn_of_graphs(parking: Parking) -> None:
    """Warns where captured graphs may read the old addresses; torch does not say of which tensors
    one is made.
    """
    device = parking.device
    if device is None or not parking.is_parked:
        return
    if _private_pools.reserved_bytes(device, _device.allocator_figures(device)):
        warn(
            "a captured graph, or another private pool, holds memory on this device. A graph that "
            "was captured over parked tensors reads other bytes when it is replayed: capture it "
            "anew after residency.unpark.",
        )


def remember(parking: Parking) -> None:
    """Lets ``unpark`` bring back what a parking moves that another caller began."""
    known = _parkings.setdefault(parking.owner, [])
    known[:] = [other for other in known if other.is_parked and other is not parking]
    known.append(parking)


def is_parked(owner: Owner) -> bool:
    """Returns whether ``park`` has moved something of an owner that is not back yet."""
    return any(parking.is_parked for parking in _parkings.get(owner, ()))


def check_owner(owner: object, function: str) -> None:
    """Refuses what cannot be parked."""
    if not isinstance(owner, nn.Module | Optimizer):
        raise InvalidArgumentError(
            f"{function} got {type(owner).__name__}; expected a module or an optimizer."
        )
