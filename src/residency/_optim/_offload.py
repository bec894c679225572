"""The two public functions: an optimizer's class is swapped in place, and swapped back.

Invariant: everything that can be refused is refused before anything moves, and an optimizer that
was refused steps as if nothing had been asked.
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer, lr_scheduler

from residency import _device
from residency._errors import InvalidArgumentError, RefusedError
from residency._optim._homes import Homes, ParameterState, State
from residency._optim._offload_data import Offload
from residency._optim._offloaded import (
    OffloadedOptimizer,
    adopt_foreign_state,
    refuse_foreign_step,
)
from residency._optim._plan import Member
from residency._optim._separable import separability
from residency._optim._shadow import PRIVATE
from residency._transfer import align_up, copy_to_host
from residency._units import parse_bytes

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)

_classes: weakref.WeakKeyDictionary[type[Optimizer], type[Optimizer]] = weakref.WeakKeyDictionary()


def offload_optimizer(
    optimizer: OptimizerT, *, resident: int | str = 0, bucket: int | str = "128MiB", slots: int = 3
) -> OptimizerT:
    """Moves an optimizer's state to the host; from now on a step streams it through the device.

    Args:
        optimizer: Changed in place: its class becomes a subclass of ``OffloadedOptimizer`` and of
            its own.
        resident: Bytes of state that may stay on the device, taken in group order.
        bucket: Bytes of state that move together.
        slots: Buckets that may be on the device at once; 3 lets both copies and the step overlap.

    Returns:
        The same object.

    Raises:
        InvalidArgumentError: A size does not parse, or there are no slots.
        RefusedError: The optimizer cannot be stepped in parts with the same bits, or the host has
            no room. Nothing has moved.

    Memory:
        Device bytes of state during a step, the first included, are at most
        ``resident + slots * max(bucket, s)``, where ``s`` is the state of the largest parameter
        that cannot be cut (0 for element-wise optimizers with contiguous parameters and a bucket of
        at least 64 elements), each state rounded up to 512 bytes. Pinned host bytes are those of
        the state, each rounded up to 512, plus what is left at the end of each slab.
    """
    settings = _settings(resident, bucket, slots)
    if isinstance(optimizer, OffloadedOptimizer):
        raise RefusedError(
            f"this {type(optimizer).__name__} is offloaded already. To change its settings, call "
            "onload_optimizer first."
        )
    base = type(optimizer)
    device = _validated_device(optimizer)
    _validate_step_patch(optimizer)
    offload = Offload(base, separability(optimizer), settings["bucket"], settings["slots"])
    if device.type != "cpu":
        offload.homes = Homes(device)
        offload.resident = _choose_resident(offload, optimizer, settings["resident"])
        offload.homes.arena.reserve(_announced_bytes(offload, optimizer))
        offload.state = _moved_state(offload.homes, offload, optimizer)
    optimizer.__dict__[PRIVATE] = offload
    if offload.state is not None:
        optimizer.state = offload.state
    optimizer.__class__ = _offloaded_class(base)  # type: ignore[assignment]  # a subclass
    _remake_step_patch(optimizer)
    offload.guard = optimizer.register_step_pre_hook(refuse_foreign_step)
    hooks: Any = optimizer._optimizer_step_pre_hooks  # an OrderedDict
    hooks.move_to_end(offload.guard.id, last=False)
    return optimizer


def onload_optimizer(optimizer: OptimizerT) -> OptimizerT:
    """Undoes ``offload_optimizer``: the state is back on the device, and nothing pinned is left.

    Args:
        optimizer: Changed in place: it gets its own class and a plain state back.

    Returns:
        The same object.

    Raises:
        RefusedError: The optimizer is not offloaded.

    Memory:
        The device holds the whole state again. Pinned memory stays for homes that the caller still
        refers to.
    """
    offload = optimizer.__dict__.get(PRIVATE)
    if not isinstance(offload, Offload):
        raise RefusedError(
            f"this {type(optimizer).__name__} is not offloaded, so there is no way back."
        )
    _validate_step_patch(optimizer)
    adopt_foreign_state(optimizer, offload)
    if isinstance(offload.state, State) and offload.homes is not None:
        # Complete before anything is swapped: a device without room leaves the optimizer offloaded.
        optimizer.state = _plain_state(offload.state, offload.homes.device)
        _device.synchronize(offload.homes.device)
    if offload.guard is not None:
        offload.guard.remove()
    del optimizer.__dict__[PRIVATE]
    optimizer.__class__ = offload.base  # type: ignore[assignment]  # the class that it had
    _remake_step_patch(optimizer)
    offload.state = offload.homes = None
    _device.release_pinned_cache()
    return optimizer


def _settings(resident: int | str, bucket: int | str, slots: int) -> dict[str, int]:
    if isinstance(slots, bool) or not isinstance(slots, int) or slots < 1:
        raise InvalidArgumentError(f"slots is {slots!r}; expected a whole number of at least 1.")
    sizes = {
        "resident": parse_bytes(resident, name="resident"),
        "bucket": parse_bytes(bucket, name="bucket"),
        "slots": slots,
    }
    if sizes["bucket"] < 1:
        raise InvalidArgumentError("bucket is 0 bytes; expected room for at least one element.")
    return sizes


def _validated_device(optimizer: Optimizer) -> torch.device:
    name = type(optimizer).__name__
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for group in optimizer.param_groups:
        for flag, reason in (
            ("capturable", "a captured step replays fixed addresses, and streamed state has none"),
            ("differentiable", "a step inside the graph would keep every slot alive"),
        ):
            if group.get(flag):
                raise RefusedError(f"{name} has {flag}=True: {reason}. Build it with {flag}=False.")
        if len({id(p) for p in group["params"]}) != len(group["params"]):
            raise RefusedError(f"{name} has a group that lists a parameter twice. List it once.")
    for parameter in parameters:
        if type(parameter) not in (Tensor, torch.nn.Parameter):
            raise RefusedError(
                f"{name} has a parameter of type {type(parameter).__name__}; only torch.Tensor and "
                "torch.nn.Parameter are supported."
            )
        if type(parameter.data) is not Tensor:
            raise RefusedError(
                f"{name} has a parameter over a {type(parameter.data).__name__}; only plain "
                "tensors are supported."
            )
    if not parameters:
        raise RefusedError(f"{name} has no parameters; add a group with some first.")
    devices = {p.device for p in parameters}
    if len(devices) != 1:
        raise RefusedError(
            f"{name} has parameters on {sorted(map(str, devices))}; expected them on one device."
        )
    device: torch.device = devices.pop()
    accelerator = _device.accelerator()
    if device.type != "cpu" and (accelerator is None or accelerator.type != device.type):
        raise RefusedError(f"{name} has its parameters on {device}, which is no accelerator here.")
    return device


def _validate_step_patch(optimizer: Optimizer) -> None:
    patch = optimizer.__dict__.get("step")
    if patch is None or _is_scheduler_patch(patch, type(optimizer)):
        return
    raise RefusedError(
        f"this {type(optimizer).__name__} has a `step` attribute of its own ({patch!r}) that no LR "
        "scheduler of torch made; it would go around the swap. Swap before the optimizer is "
        "wrapped."
    )


def _is_scheduler_patch(patch: Any, owner: type[Optimizer]) -> bool:
    made_by = getattr(patch, "__globals__", None)
    return (
        getattr(patch, "_wrapped_by_lr_sched", False)
        and (made_by is vars(lr_scheduler) or made_by is globals())
        and getattr(patch, "__wrapped__", None) is owner.step
    )


def _remake_step_patch(optimizer: Optimizer) -> None:
    """Makes the LR scheduler's patch again: it closes over the step function of the class
    before.
    """
    if optimizer.__dict__.pop("step", None) is None:
        return
    owner = weakref.ref(optimizer)
    function: Callable[..., Any] = type(optimizer).step

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        found = owner()
        assert found is not None
        found._opt_called = True  # type: ignore[attr-defined]  # as the scheduler's
        return function(found, *args, **kwargs)

    wrapper._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = wrapper  # type: ignore[method-assign]


def _offloaded_class(base: type[Optimizer]) -> type[Optimizer]:
    found = _classes.get(base)
    if found is None:
        # Same names: the profiler's range and torch.save's errors are made of them.
        namespace = {"__module__": base.__module__, "__qualname__": base.__qualname__}
        found = type(base.__name__, (OffloadedOptimizer, base), namespace)
        _classes[base] = found
    return found


def _members(optimizer: Optimizer) -> list[Member]:
    return [
        Member(index, parameter)
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    ]


def _expected_bytes(
    offload: Offload, optimizer: Optimizer, member: Member, *, exact: bool = False
) -> int:
    """Returns the bytes that a parameter's state has or will get, at most.

    With ``exact``, a state that does not exist yet counts only where its size is certain.
    """
    values = dict.get(optimizer.state, member.parameter)
    if values:
        tensors = [v for v in values.values() if isinstance(v, Tensor) and not v.is_cpu]
        return sum(align_up(t.numel() * t.element_size()) for t in tensors)
    size = offload.size_of(optimizer, member)
    if size is None or (exact and not (size.is_exact and member.parameter.requires_grad)):
        return 0
    return size.bytes_for(member.parameter.numel())


def _announced_bytes(offload: Offload, optimizer: Optimizer) -> int:
    members = [m for m in _members(optimizer) if id(m.parameter) not in offload.resident]
    return sum(_expected_bytes(offload, optimizer, m, exact=True) for m in members)


def _choose_resident(offload: Offload, optimizer: Optimizer, budget_bytes: int) -> set[int]:
    chosen: set[int] = set()
    if not budget_bytes:
        return chosen
    left = budget_bytes
    for member in _members(optimizer):
        is_born = bool(dict.get(optimizer.state, member.parameter))
        if not is_born and offload.size_of(optimizer, member) is None:
            continue  # what cannot be estimated cannot be promised to fit
        num_bytes = _expected_bytes(offload, optimizer, member)
        if num_bytes <= left:
            chosen.add(id(member.parameter))
            left -= num_bytes
    return chosen


def _moved_state(homes: Homes, offload: Offload, optimizer: Optimizer) -> State:
    """Builds the offloaded state, with copies home queued behind what the device does now."""
    state = State(homes, offload.resident)
    for parameter, values in optimizer.state.items():
        if not (isinstance(parameter, Tensor) and isinstance(values, dict)):
            state[parameter] = values
            continue
        inner = state.of(parameter)
        moving: list[Tensor] = []
        regions = []
        for key, value in values.items():
            if inner.is_resident or not isinstance(value, Tensor) or value.is_cpu:
                dict.__setitem__(inner, key, value)
                continue
            home = homes.allocate(value)
            inner.settle(key, home)
            moving.append(value)
            regions.append(home.region)
        if moving:
            inner.written = copy_to_host(moving, regions, lanes=homes.lanes, gate=homes.gate)
            homes.newest = inner.written
            homes.gate.before_free(moving)
    return state


def _plain_state(state: State, device: torch.device) -> defaultdict[Any, Any]:
    plain: defaultdict[Any, Any] = defaultdict(dict)
    for parameter, inner in state.items():
        if not isinstance(inner, ParameterState):
            plain[parameter] = inner
            continue
        plain[parameter] = {
            key: value.to(device) if key in inner.homes_by_key else value
            for key, value in inner.items()
        }
    return plain
