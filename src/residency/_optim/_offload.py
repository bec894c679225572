"""The two public functions: an optimizer's class is swapped in place, and swapped back.

Invariant, which ``tests/optim/test_interrupted_moves.py`` tries to break: everything that can be
refused is refused before anything moves, and an optimizer that was refused steps as if nothing had
been asked.
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from residency import _device, _pinned
from residency._errors import InvalidArgumentError, RefusedError
from residency._modes import inference_mode_off
from residency._optim._exchange import exchanges_of
from residency._optim._masters import check_masters
from residency._optim._offload_record import Offload, put_record, record_of
from residency._optim._offloaded import (
    OffloadedOptimizer,
    refuse_foreign_step,
    step_like,
)
from residency._optim._placement import follow_caller, members_of, place_state, plain_state
from residency._optim._states import State
from residency._optim._step_patch import remake_step_patch, validate_step_patch
from residency._optim._trial._borrowed import refuse_borrowed
from residency._optim._trial._separable import separability
from residency._optim._validate import check_groups, device_of
from residency._optim._wrappers import reaching_inside
from residency._transfer import note_owned, state_stays
from residency._units import parse_bytes
from residency._whole import done_whole

AUTO = "auto"
OptimizerT = TypeVar("OptimizerT", bound=Optimizer)

_classes: weakref.WeakKeyDictionary[type[Optimizer], type[Optimizer]] = weakref.WeakKeyDictionary()


@inference_mode_off()
@reaching_inside
@state_stays()
def offload_optimizer(
    optimizer: OptimizerT,
    *,
    resident: int | str = 0,
    bucket: int | str | None = None,
    slots: int = 3,
    pin: bool = True,
    master_weights: bool = False,
    overlap: bool = False,
) -> OptimizerT:
    """Moves an optimizer's state to the host; from now on a step streams it through the device.

    Args:
        optimizer: Changed in place: its new class is a subclass of ``OffloadedOptimizer`` and of
            its old class. Of a wrapper by accelerate's ``prepare``, the one inside is changed;
            its figures are at ``wrapper.optimizer.statistics()``.
        resident: Bytes of state that may stay on the device, taken in group order; a parameter
            whose state outgrows this limit streams then. ``"auto"`` takes the room that is left.
        bucket: Bytes of state that move together. None takes 128 MiB; for a small state it takes a
            power of two from 1 MiB on, so that all slots have at most a quarter of the state.
        slots: Buckets that may be on the device at once; 3 lets both copies and the step overlap.
        pin: Whether the host memory is page-locked; if not, copies block the host.
        master_weights: Whether bfloat16 and float16 parameters get float32 masters, which are
            stepped in their place and rounded; they are state, under the key ``master_weight``.
        overlap: Whether state moves under the passes, too, if the run's own peak leaves room.

    Returns:
        The same object.

    Raises:
        InvalidArgumentError: It is no optimizer, a size does not parse, or there are no slots.
        RefusedError: The optimizer cannot be stepped in parts with the same bits, states share
            bytes, or the host has no room, or the device's memory. Nothing has moved.
        torch.OutOfMemoryError: The device has no room for resident state. Nothing has moved.

    Memory:
        Device bytes of state during a step, the first included, are at most
        ``resident + slots * max(bucket, s)``; ``s`` is the state of the largest parameter that
        cannot be cut, each state rounded up to 512 bytes. A bucket that is not given has 128 MiB at
        most. Only the element-wise classes of ``torch.optim`` cut, and only contiguous parameters;
        for these ``s`` is 0 if a bucket has 64 elements or more. Any other class, a subclass of
        these too, moves whole parameters. Pinned host bytes are the state's, each rounded up to
        512, plus the unused end of each slab. Masters need more beside the slots: a float32 copy of
        a unit's gradients, and 7 bytes for each element of a parameter whose master is compared.
    """
    settings = _settings(resident, bucket, slots, pin, master_weights, overlap)
    base = type(optimizer)
    if isinstance(optimizer, OffloadedOptimizer):
        raise RefusedError(
            f"this {base.__name__} is offloaded already: call onload_optimizer before."
        )
    check_groups(base.__name__, optimizer.param_groups)
    device = device_of(base.__name__, [m.parameter for m in members_of(optimizer)])
    validate_step_patch(optimizer)
    swapped = _offloaded_class(base)
    kind = separability(optimizer, base, optimizer.param_groups)
    offload = Offload(base, kind, **settings)
    check_masters(base.__name__, master_weights, device, members_of(optimizer))
    _install(optimizer, offload, swapped, device)
    return optimizer


@inference_mode_off()
@reaching_inside
def onload_optimizer(optimizer: OptimizerT) -> OptimizerT:
    """Undoes ``offload_optimizer``: the state is back on the device, and nothing pinned is left.

    Args:
        optimizer: Changed in place: it gets its own class and a plain state back. If it is the
            result of accelerate's ``prepare``, the optimizer inside is changed.

    Returns:
        The same object.

    Raises:
        InvalidArgumentError: It is no optimizer.
        RefusedError: The optimizer is not offloaded, or has master weights; code other than torch's
            LR schedulers has wrapped its ``step``; or its parameters are on several devices.
            Nothing has changed.
        torch.OutOfMemoryError: The device has no room for the whole state. The optimizer is
            offloaded as before.

    Memory:
        The device holds the whole state again. Pinned memory stays for homes that the caller still
        refers to. Of the rest, torch's cache keeps up to 64 MiB for the next caller that pins
        memory. If there is more, it goes back to the system, with the rest of this cache.
    """
    offload = record_of(optimizer)
    if offload is None:
        raise RefusedError(
            f"this {type(optimizer).__name__} is not offloaded, so there is no way back; call "
            "offload_optimizer first."
        )
    validate_step_patch(optimizer)
    if offload.master_weights:
        raise RefusedError(
            f"this {type(optimizer).__name__} has master weights, which a plain one has no place "
            "for: it would go on from rounded parameters. Save state_dict() and load it into an "
            "optimizer that is offloaded with master_weights=True."
        )
    follow_caller(optimizer, offload)
    plain: defaultdict[object, object] | None = None
    if offload.host is not None:
        _forget_templates(offload.host.state)
        # Complete before anything is swapped: a device without room leaves the optimizer offloaded.
        plain = plain_state(offload.host.state, offload.host.homes.device)
        offload.host.homes.fence()  # before the homes go
    pinned_bytes = 0 if offload.host is None else offload.host.homes.arena.pinned_bytes
    done_whole(lambda: _swap_back(optimizer, offload, plain, pinned_bytes))
    return optimizer


def _install(
    optimizer: Optimizer, offload: Offload, swapped: type[Optimizer], device: torch.device
) -> None:
    """Places the state and swaps the class; after an exception everything is as it was."""
    name = offload.base.__name__
    refuse_borrowed(name, optimizer.param_groups, optimizer.state)
    if device.type != "cpu":
        _device.refuse_shared_memory(device, f"an offload of this {name}")
    before = dict(optimizer.__dict__)
    try:
        if device.type != "cpu":
            place_state(optimizer, offload, device)
        _swap(optimizer, offload, swapped)
    except BaseException:
        if offload.guard is not None:
            offload.guard.remove()
        optimizer.__class__ = offload.base
        optimizer.__dict__.clear()
        optimizer.__dict__.update(before)
        note_owned(optimizer, is_owned=False)
        if device.type != "cpu":
            _device.synchronize(device)  # copies into homes that go now may be under way
        raise


def _swap(optimizer: Optimizer, offload: Offload, swapped: type[Optimizer]) -> None:
    put_record(optimizer, offload)
    optimizer.__class__ = swapped
    remake_step_patch(optimizer)
    offload.guard = optimizer.register_step_pre_hook(refuse_foreign_step)
    hooks: Any = optimizer._optimizer_step_pre_hooks  # an OrderedDict
    hooks.move_to_end(offload.guard.id, last=False)
    note_owned(optimizer, is_owned=True)


def _forget_templates(state: State) -> None:
    # In a function of its own: a name that is left would keep the homes.
    for inner in state.values():
        inner.forget_template()


def _swap_back(
    optimizer: Optimizer,
    offload: Offload,
    plain: defaultdict[Any, Any] | None,
    pinned_bytes: int,
) -> None:
    if plain is not None:
        optimizer.state = plain
    if offload.guard is not None:
        offload.guard.remove()
    put_record(optimizer, None)
    optimizer.__class__ = offload.base
    remake_step_patch(optimizer)
    note_owned(optimizer, is_owned=False)
    offload.host = None
    _pinned.give_back_pinned(pinned_bytes)


def parse_bucket(bucket: int | str | None, *, name: str = "bucket") -> int | None:
    """Returns the bytes of a setting ``bucket``; None for one that is not given.

    Raises:
        InvalidArgumentError: It does not parse.
    """
    return None if bucket is None else parse_bytes(bucket, name=name)


def parse_resident(resident: int | str, *, overlap: bool) -> int:
    """Returns the bytes of a setting ``resident``; 0 for ``"auto"``, which no size limits.

    Raises:
        InvalidArgumentError: It does not parse, or is ``"auto"`` without ``overlap``.
    """
    if resident == AUTO and not overlap:
        raise InvalidArgumentError('resident is "auto", which needs overlap=True.')
    return 0 if resident == AUTO else parse_bytes(resident, name="resident")


def _settings(
    resident: int | str,
    bucket: int | str | None,
    slots: int,
    pin: bool,
    master_weights: bool,
    overlap: bool,
) -> dict[str, Any]:
    switches = {"pin": pin, "master_weights": master_weights, "overlap": overlap}
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise InvalidArgumentError(f"{name} is {value!r}; expected True or False.")
    if isinstance(slots, bool) or not isinstance(slots, int) or slots < 1:
        raise InvalidArgumentError(f"slots is {slots!r}; expected a whole number of at least 1.")
    sizes = {
        "resident_bytes": parse_resident(resident, overlap=overlap),
        "bucket_bytes": parse_bucket(bucket),
        "num_slots": slots,
        "pin": pin,
        "master_weights": master_weights,
        "overlaps": overlap,
        "keeps": resident == AUTO,
    }
    if sizes["bucket_bytes"] == 0:
        raise InvalidArgumentError("bucket is 0 bytes; expected room for at least one element.")
    return sizes


def _offloaded_class(base: type[Optimizer]) -> type[Optimizer]:
    found = _classes.get(base)
    if found is None:
        # Same names: the profiler's range and torch.save's errors are made of them.
        namespace: dict[str, Any] = {"__module__": base.__module__, "step": step_like(base)}
        namespace |= {"__qualname__": base.__qualname__, **exchanges_of(base)}
        try:
            metaclass: Any = type(base)
            found = _metaclass_of(metaclass)(base.__name__, (base, OffloadedOptimizer), namespace)
            # Tried on an instance without other references, before anything moves.
            object.__new__(base).__class__ = found
        except Exception as error:  # whatever `__init_subclass__` or a metaclass raises
            raise RefusedError(
                f"{base.__name__} cannot be offloaded: its instances cannot become instances of a "
                f"subclass ({type(error).__name__}: {error}). Keep its state on the device."
            ) from error
        _classes[base] = found
    return found


@functools.cache
def _metaclass_of(metaclass: Any) -> Any:
    """Returns a metaclass whose classes look at ``OffloadedOptimizer`` before all their bases.

    An instance may change its class only where both have the same layout, which Python takes from
    the first base; that of ``class Foreign(abc.ABC, Optimizer)`` is another than ours.
    """

    def mro(cls: type) -> list[type]:
        own, *others = metaclass.mro(cls)
        if OffloadedOptimizer not in cls.__bases__:  # another's class above ours, Lightning's
            return [own, *others]
        return [own, OffloadedOptimizer, *(c for c in others if c is not OffloadedOptimizer)]

    return type(metaclass.__name__, (metaclass,), {"mro": mro})
