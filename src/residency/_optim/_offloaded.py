"""The class that an offloaded optimizer gets: its old class' interface, with the state at home on
the host.

Mixed in front of the optimizer's own class, so that ``isinstance``, hooks, schedulers and
``GradScaler`` find what they expect. Invariant, which ``tests/optim/test_refusals.py`` tries to
break: a step enters through ``OffloadedOptimizer.step`` or is refused by the guard.
"""

from __future__ import annotations

import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from residency import _device
from residency._dtensor import local_of, moved
from residency._errors import InvalidArgumentError, RefusedError
from residency._modes import inference_mode_off
from residency._optim._loading import prepare_load
from residency._optim._offload_record import Loading, Offload, record_of
from residency._optim._overlap import Figures
from residency._optim._placement import adopt_foreign_state, follow_caller, members_of, prime_state
from residency._optim._savings import tell_savings
from residency._optim._state import ParameterState
from residency._optim._statistics import OffloadStatistics, Timeline, bytes_per_second
from residency._optim._stream import StreamedStep
from residency._optim._trial._separable import separability
from residency._optim._trial._step_call import raw_step
from residency._optim._validate import check_flags, check_groups, device_of
from residency._units import format_bytes

_NUM_CALLERS = 8  # between torch's function and ours: overridden `state_dict`, wrappers of it


class OffloadedOptimizer(Optimizer):
    """An optimizer whose state lives on the host; made by ``residency.offload_optimizer``.

    Memory:
        Device bytes of state during a step are at most ``resident + slots * slot_bytes``.
        ``slot_bytes`` is the bucket, or the state of the largest parameter, if that is more and the
        optimizer is not element-wise or the parameter not contiguous. Between steps only resident
        state is there. The first step, which makes the state, keeps to the same bound.
    """

    def __init__(self, *_: object, **__: object) -> None:
        raise InvalidArgumentError(
            f"{type(self).__name__} is the class of optimizers that are offloaded already, and "
            "makes none. Call residency.offload_optimizer(optimizer), or make and offload one by "
            "residency.optim.AdamW(params, lr=...)."
        )

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Takes one step, bit for bit the step of the optimizer's own class.

        Args:
            args: The arguments of the class's own step. One may be a closure (a function without
                arguments). It is evaluated once, first, with gradients enabled; the parts of the
                step get its result and the other arguments.
            kwargs: The same by name.

        Returns:
            The closure's result, or None.

        Raises:
            TypeError: The class's own step does not take these arguments.
            RefusedError: An argument is no number, text or scalar tensor, or makes the step couple
                its parameters or evaluate its closure more than once. Or a state was pointed to
                other memory, two parameters have one mapping as their state, a gradient is sparse,
                the parameters are on several devices, a parameter has another shape or dtype than
                its state was made for, a group was made ``capturable`` or ``differentiable``, or
                the host has no room for the state that this step makes. Nothing was stepped; remove
                the cause, and the next step continues exactly. One exception: if the first step of
                a class cannot be foreseen (its code fails on meta and on small host tensors), the
                host may run out of room midway.
            torch.OutOfMemoryError: The device has no room for the slots; then nothing was stepped.
                Or it has no room for the step's own allocations; then, as in torch's own step, some
                parameters have been stepped and others not; group values and attributes are as
                before.
            ResidencyError: The step turned out to couple its parameters, to change a tensor that
                its parts share, or to make a state of a tensor that has another use, too, such as
                a gradient. Some parameters have been stepped.

        If an exception ends a step midway, each parameter is either fully updated, with its state,
        or unchanged; a parameter that is stepped in cuts may be updated up to some element. Only
        the parameters that the optimizer's own code was changing when it failed may be in between,
        and their streamed state is unchanged. A note on the exception counts both kinds;
        ``error.stepped_parameters`` and ``error.parameters_in_part`` list them. Another call steps
        every parameter with a gradient: set ``grad = None`` for the parameters that were stepped,
        and it does the rest of the same step, bit for bit.
        """
        offload = offload_of(self)
        try:
            offload.is_entered = True
            with inference_mode_off():
                return _hooked_step(self, *args, **kwargs)
        finally:
            offload.is_entered = False

    @inference_mode_off()
    def prime(self) -> None:
        """Makes the state of every parameter that has none, as a template for a load.

        ``dcp.load`` and ``get_optimizer_state_dict`` need the tensors that they are to fill; torch
        makes them by a step with zero gradients. Here they are zeros in the homes, and `step` is
        zero; parameters, counters and settings are not touched. A step without a load is the step
        of a fresh optimizer.

        Raises:
            RefusedError: The host has no room, or the state that a first step makes cannot be
                foreseen for this class. Nothing was changed.

        Memory:
            No device memory, except for states that stay there (``resident=``).
        """
        offload = offload_of(self)
        offload.shows_templates = True
        follow_caller(self, offload)
        if offload.host is not None:
            prime_state(self, offload)

    def statistics(self) -> OffloadStatistics:
        """Returns the figures of this optimizer so far; waits for the newest step to end."""
        offload = offload_of(self)
        times = offload.timeline or Timeline()
        ahead = offload.host.ahead if offload.host is not None else None
        moved = ahead.figures if ahead is not None else Figures()
        inners = [v for v in dict.values(self.state) if isinstance(v, ParameterState)]
        homes = [home for inner in inners for home in inner.homes_by_key.values()]
        stay = [
            local_of(value)
            for inner in inners
            for value in dict.values(inner)
            if inner.is_resident and isinstance(value, Tensor) and not value.is_cpu
        ]
        return OffloadStatistics(
            home_bytes=sum(home.num_bytes for home in homes),
            pinned_bytes=offload.host.homes.arena.slab_bytes if offload.host and offload.pin else 0,
            resident_bytes=sum(t.numel() * t.element_size() for t in stay)
            + (ahead.kept_bytes if ahead is not None else 0),
            slot_bytes=offload.slot_bytes,
            num_slots=offload.num_slots,
            num_buckets=offload.num_buckets,
            num_steps=offload.num_steps,
            copied_to_device_bytes=offload.copied_to_device_bytes + moved.to_device_bytes,
            copied_to_host_bytes=offload.copied_to_host_bytes + moved.to_host_bytes,
            step_to_device_bytes=sum(num_bytes for _, num_bytes in times.loads),
            step_to_host_bytes=sum(num_bytes for _, num_bytes in times.stores),
            to_device_bytes_per_second=bytes_per_second(times.loads),
            to_host_bytes_per_second=bytes_per_second(times.stores),
            exposed_seconds=times.exposed_seconds() if offload.timeline else None,
            ahead_bytes=moved.here_bytes,
            room_bytes=moved.room_bytes,
            hidden_bytes=moved.hidden_bytes,
            exposed_bytes=moved.beside_bytes
            + sum(num_bytes for _, num_bytes in (*times.loads, *times.stores)),
            dropped_bytes=moved.dropped_bytes,
            is_simulated=offload.host is not None and _device.is_simulated(),
        )

    def __repr__(self) -> str:
        offload = record_of(self)
        if offload is None:
            return super().__repr__()
        if offload.host is None:
            return f"{super().__repr__()}\noffloaded: parameters on the host, nothing moves"
        num_parameters = sum(len(group["params"]) for group in self.param_groups)
        kind = "pinned" if offload.pin else "not pinned"
        most = "at most " if offload.bucket_bytes is None else ""
        return (
            f"{super().__repr__()}\n"
            f"offloaded: {format_bytes(offload.host.homes.arena.used_bytes)} of homes on the host "
            f"({format_bytes(offload.host.homes.arena.slab_bytes)}, {kind}); "
            f"{len(offload.resident)} of {num_parameters} parameters have resident state "
            f"(at most {format_bytes(offload.resident_bytes)}); the rest streams through "
            f"{offload.num_slots} slots of {most}{format_bytes(offload.most_in_bucket)}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the state in torch's format, after the host has waited for the copies to it.

        Memory:
            No copy: the tensors are the live state, as torch's are, and the next step writes into
            them. ``get_optimizer_state_dict`` with ``cpu_offload=True`` makes host copies of it, as
            without an offload.
        """
        is_copied = _is_asked_for_copies()
        saved = super().state_dict()
        states = saved.get("state")
        shows_templates = offload_of(self).shows_templates
        if not isinstance(states, dict) or states is self.state:
            return saved
        for key, values in list(states.items()):
            # Hooks see the live mappings, as they do without an offload; the result has plain
            # ones, which torch.load takes.
            if isinstance(values, ParameterState):
                if values.template is not None and not shows_templates and values.is_template():
                    states.pop(key)
                    continue
                plain = dict(values)
                if is_copied:
                    host = torch.device("cpu")
                    plain = {
                        k: moved(v, host, copy=True) if isinstance(v, Tensor) else v
                        for k, v in plain.items()
                    }
                states[key] = plain
        return saved

    @inference_mode_off()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict into the homes; only resident state goes onto the device.

        Saved dtypes are kept: torch casts floating states to the parameter's dtype, which would
        make float32 moments of bfloat16 parameters bfloat16. Each entry gets bytes of its own.

        Raises:
            ValueError: The parameter groups do not match, as torch raises it.
            RefusedError: A saved value is not dense, a saved group is one that
                ``offload_optimizer`` would refuse, values share a part of their bytes, two
                parameters have one mapping as their state, or the host has no room for the new
                homes.
            Exception: Raised by the class's own repair of old states, such as a KeyError.

        In each of these cases the optimizer is as it was.

        Memory:
            No copy of values that fit the existing homes. State that stays resident is on the
            device twice for a moment.
        """
        offload = offload_of(self)
        follow_caller(self, offload)
        if offload.host is None:
            super().load_state_dict(state_dict)
            return

        call = Loading()
        offload.loading = mine = weakref.ref(call)

        def take_state(
            optimizer: Optimizer, adapted: dict[str, object]
        ) -> dict[str, object] | None:
            call = mine()
            if call is None or offload.loading is not mine:
                return None  # an interrupt left the hook behind
            call.adapted = adapted
            return {**adapted, "state": {}}

        # Last of the hooks that may adapt the dict: torch then validates, but copies nothing.
        handle = None
        try:
            handle = self.register_load_state_dict_pre_hook(take_state)
            super().load_state_dict(state_dict)
        finally:
            if handle is not None:
                handle.remove()
            offload.loading = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; its state will live in the same place as the others' state.

        Raises:
            TypeError: The group or its parameters are of a wrong type, as torch raises it.
            ValueError: A parameter is not a leaf, or is in another group, as torch raises it.
            RefusedError: The group is one that ``offload_optimizer`` would refuse, or its
                parameters are not on the device of the others. In each of these cases no group was
                added.
        """
        offload = offload_of(self)
        name = offload.base.__name__
        before = dict(param_group) if isinstance(param_group, dict) else {}
        num_groups = len(self.param_groups)
        try:
            # Torch first: it fills the group in, and its own errors come as without an offload.
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "optimizer contains a parameter group with dupl")
                super().add_param_group(param_group)
            check_groups(name, self.param_groups[num_groups:])
            device_of(name, [m.parameter for m in members_of(self)])
            separability(self, offload.base, self.param_groups)
        except BaseException:
            del self.param_groups[num_groups:]
            if isinstance(param_group, dict):
                param_group.clear()
                param_group.update(before)
            raise
        offload.forget_plan()

    def __setstate__(self, state: dict[str, Any]) -> None:
        offload = offload_of(self)
        if offload.host is None:
            super().__setstate__(state)
            return
        others = dict(state)
        values = others.pop("state", None)
        call = offload.loading() if offload.loading is not None else None
        if call is not None and call.adapted is not None:
            groups = others.get("param_groups", self.param_groups)
            values = _by_parameter(call.adapted, groups)
        if values is None:
            values = {key: dict(inner) for key, inner in offload.host.state.items()}
        prepare_load(self, offload, values, others).finish(self, offload)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise RefusedError(
            f"an offloaded {type(self).__name__} cannot be pickled or copied: its class is made at "
            "run time and its state is pinned. Call residency.onload_optimizer first, or save "
            "state_dict()."
        )


OffloadedOptimizer.step.hooked = True  # type: ignore[attr-defined]  # it runs the hooks itself


@torch._disable_dynamo  # type: ignore[attr-defined]  # what torch.optim itself uses
def _step(optimizer: OffloadedOptimizer, *args: object, **kwargs: object) -> object:
    offload = offload_of(optimizer)
    follow_caller(optimizer, offload)
    if offload.host is None:
        offload.num_steps += 1
        loss = raw_step(offload.base)(optimizer, *args, **kwargs)
        tell_savings(optimizer, offload)
        return loss
    call = offload.take_call(optimizer, args, kwargs)
    loss = None
    if call.closure is not None:
        with torch.enable_grad():
            loss = call.closure()
        adopt_foreign_state(optimizer, offload)
    check_flags(offload.base.__name__, optimizer.param_groups)
    host = offload.on_host
    StreamedStep(optimizer, offload, host.homes, host.state, call.after(loss)).run()
    tell_savings(optimizer, offload)
    return loss


def _is_asked_for_copies() -> bool:
    """Returns whether ``get_optimizer_state_dict`` asks, which is to hand out copies on the host.

    Torch copies what is on the device there and passes on what is on the host, so only the caller's
    options say it (``_get_optim_state_dict`` of torch 2.11 to 2.13 has them as ``info``).
    """
    module: Any = sys.modules.get("torch.distributed.checkpoint.state_dict")
    code = (
        getattr(inspect.unwrap(module._get_optim_state_dict), "__code__", None) if module else None
    )
    frame = sys._getframe(2) if code is not None else None
    for _ in range(_NUM_CALLERS):
        if frame is None:
            return False
        if frame.f_code is code:
            return bool(getattr(frame.f_locals.get("info"), "cpu_offload", False))
        frame = frame.f_back
    return False


_hooked_step: Callable[..., Any] = Optimizer.profile_hook_step(_step)


def step_like(base: type[Optimizer]) -> Callable[..., Any]:
    """Returns the ``step`` of a class' offloaded one, which says that it takes what the class' own
    does: ``GradScaler`` looks for a parameter by its name.
    """

    def step(self: OffloadedOptimizer, *args: Any, **kwargs: Any) -> Any:
        return OffloadedOptimizer.step(self, *args, **kwargs)

    made: Any = step
    made.__doc__ = OffloadedOptimizer.step.__doc__
    made.__signature__ = inspect.signature(raw_step(base))
    made.hooked = True  # as that of ``OffloadedOptimizer``
    return step


def refuse_foreign_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Stops a step of the old class, as its pre-hook: it would see host state and fail
    midway.
    """
    if not offload_of(optimizer).is_entered:
        raise RefusedError(
            f"this call reached {type(optimizer).__name__}.step from before the offload, through a "
            "bound method or a patch that was made earlier. Nothing was stepped: call "
            "optimizer.step(), or offload the optimizer before it is wrapped. With accelerate and "
            "a GradScaler, pass the result of prepare to offload_optimizer, not the inner one."
        )


def offload_of(optimizer: Optimizer) -> Offload:
    """Returns what an offloaded optimizer knows; refuses one that is not offloaded (any more)."""
    offload = record_of(optimizer)
    if offload is None:
        raise RefusedError(
            f"this {type(optimizer).__name__} is not offloaded (any more); the call came through a "
            "method of the offloaded class that was kept. Call the optimizer's own method."
        )
    return offload


def _by_parameter(
    saved: Mapping[str, Any], groups: list[dict[str, Any]]
) -> dict[Any, dict[str, Any]]:
    names = [name for group in saved["param_groups"] for name in group["params"]]
    parameters = [p for group in groups for p in group["params"]]
    of_name = dict(zip(names, parameters, strict=True))
    return {of_name.get(name, name): value for name, value in saved["state"].items()}
