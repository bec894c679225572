"""The class that an offloaded optimizer gets: its old class' interface, with the state at home on
the host.

Mixed in front of the optimizer's own class, so that ``isinstance``, hooks, schedulers and
``GradScaler`` find what they expect. Invariant: a step enters through ``OffloadedOptimizer.step``
or is refused by the guard.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from residency._errors import RefusedError
from residency._optim._homes import ParameterState, State
from residency._optim._offload_data import Offload
from residency._optim._shadow import PRIVATE, raw_step
from residency._optim._statistics import OffloadStatistics
from residency._optim._stream import StreamedStep


class OffloadedOptimizer(Optimizer):
    """Is an optimizer whose state lives on the host; made by ``residency.offload_optimizer``.

    Memory:
        Device bytes of state during a step are at most ``resident + slots * slot_bytes``, where
        ``slot_bytes`` is the bucket, or the state of the largest parameter where that is more and
        the optimizer is not element-wise or the parameter not contiguous. Between steps they are
        the resident ones alone. The first step, which makes the state, keeps to the same bound.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step, bit for bit the step of the optimizer's own class.

        Args:
            closure: Evaluated once, first, with gradients enabled.

        Returns:
            What the closure returned, or None.

        Raises:
            RefusedError: A gradient is sparse, or a parameter is on another device than at the
                offload; nothing was stepped.
            ResidencyError: The step turned out to couple its parameters.
        """
        offload = _offload_of(self)
        offload.is_entered = True
        try:
            return _hooked_step(self) if closure is None else _hooked_step(self, closure)
        finally:
            offload.is_entered = False

    def prime(self) -> None:
        """Pins the host memory for the announced state now, so that the first step need not."""
        offload = _offload_of(self)
        if offload.homes is not None:
            offload.homes.arena.prime()

    def statistics(self) -> OffloadStatistics:
        """Returns the figures of this optimizer so far."""
        offload = _offload_of(self)
        inners = [v for v in dict.values(self.state) if isinstance(v, ParameterState)]
        homes = [home for inner in inners for home in inner.homes_by_key.values()]
        stay = [
            value
            for inner in inners
            for value in dict.values(inner)
            if inner.is_resident and isinstance(value, Tensor) and not value.is_cpu
        ]
        return OffloadStatistics(
            home_bytes=sum(home.num_bytes for home in homes),
            pinned_bytes=offload.homes.arena.pinned_bytes if offload.homes else 0,
            resident_bytes=sum(t.numel() * t.element_size() for t in stay),
            slot_bytes=offload.slot_bytes,
            num_slots=offload.num_slots,
            num_buckets=offload.num_buckets,
            num_steps=offload.num_steps,
            copied_to_device_bytes=offload.copied_to_device_bytes,
            copied_to_host_bytes=offload.copied_to_host_bytes,
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as torch shapes it, after the host has waited for copies home.

        Memory:
            No copy: the tensors are the homes, as torch's are the live state, and the next step
            writes into them.
        """
        state = self.state
        if not isinstance(state, State):
            return super().state_dict()
        plain = {k: dict(v) if isinstance(v, ParameterState) else v for k, v in state.items()}
        self.__dict__["state"] = defaultdict(dict, plain)
        try:
            return super().state_dict()
        finally:
            self.__dict__["state"] = state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict into the homes; nothing that is not resident touches the device.

        Saved dtypes are kept: torch casts floating states to the parameter's dtype, which would
        make float32 moments of bfloat16 parameters bfloat16.

        Raises:
            ValueError: The parameter groups do not match, as torch raises it; nothing was loaded.
        """
        offload = _offload_of(self)
        if offload.homes is None:
            super().load_state_dict(state_dict)
            return
        adopt_foreign_state(self, offload)

        def take_state(optimizer: Optimizer, adapted: dict[str, Any]) -> dict[str, Any]:
            offload.loading = adapted
            return {**adapted, "state": {}}

        # Last of the hooks that may adapt the dict: torch then validates, but copies nothing.
        handle = self.register_load_state_dict_pre_hook(take_state)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            offload.loading = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, whose state will live where the others' does.

        Raises:
            RefusedError: A parameter is not on the optimizer's device; no group was added.
        """
        offload = _offload_of(self)
        params = param_group["params"]
        listed = [params] if isinstance(params, Tensor) else list(params)
        param_group["params"] = listed
        if offload.homes is not None:
            for entry in listed:
                parameter = entry[1] if isinstance(entry, tuple) else entry
                if isinstance(parameter, Tensor) and parameter.device != offload.homes.device:
                    raise RefusedError(
                        f"a parameter of shape {tuple(parameter.shape)} is on {parameter.device}, "
                        f"the optimizer was offloaded from {offload.homes.device}. Move it there "
                        "first."
                    )
        super().add_param_group(param_group)
        offload.forget_plan()

    def __setstate__(self, state: dict[str, Any]) -> None:
        offload = _offload_of(self)
        if not isinstance(offload.state, State):
            super().__setstate__(state)
            return
        others = dict(state)
        values = others.pop("state", None)
        if "param_groups" in others:
            self.param_groups = others["param_groups"]
        if offload.loading is not None:
            values = _by_parameter(offload.loading, self.param_groups)
        if values is not None:
            _load(offload, offload.state, values, self.param_groups)
        offload.forget_plan()
        super().__setstate__(others)  # the classes' own repairs of old states, on the homes

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RefusedError(
            f"an offloaded {type(self).__name__} cannot be pickled or copied: its class is made at "
            "run time and its state is pinned. Call residency.onload_optimizer first, or save "
            "state_dict()."
        )


OffloadedOptimizer.step.hooked = True  # type: ignore[attr-defined]  # it runs the hooks itself


@torch._disable_dynamo  # type: ignore[attr-defined]  # what torch.optim itself uses
def _step(optimizer: OffloadedOptimizer, closure: Callable[[], Any] | None = None) -> Any:
    offload = _offload_of(optimizer)
    _refuse_moved_parameters(optimizer, offload)
    if offload.homes is None or offload.state is None:
        offload.num_steps += 1
        return raw_step(offload.base)(optimizer, *([] if closure is None else [closure]))
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    adopt_foreign_state(optimizer, offload)
    StreamedStep(optimizer, offload, offload.homes, offload.state).run()
    return loss


def adopt_foreign_state(optimizer: Optimizer, offload: Offload) -> None:
    """Takes over a mapping that somebody put at ``optimizer.state``, such as an empty one."""
    foreign = optimizer.state
    if offload.state is None or foreign is offload.state:
        return
    for stale in [k for k in offload.state if k not in foreign]:
        del offload.state[stale]
    offload.state.update(foreign)
    optimizer.state = offload.state


def _refuse_moved_parameters(optimizer: Optimizer, offload: Offload) -> None:
    expected = torch.device("cpu") if offload.homes is None else offload.homes.device
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.device != expected:
                raise RefusedError(
                    f"a parameter of shape {tuple(parameter.shape)} is on {parameter.device} now, "
                    f"and was on {expected} when the optimizer was offloaded. Nothing was stepped: "
                    "call onload_optimizer and offload_optimizer again after moving the model."
                )


_hooked_step: Callable[..., Any] = Optimizer.profile_hook_step(_step)


def refuse_foreign_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Is the step pre-hook that stops a step of the old class: it would see host state and fail
    midway.
    """
    if not _offload_of(optimizer).is_entered:
        raise RefusedError(
            f"this call reached {type(optimizer).__name__}.step from before the offload, through a "
            "bound method or a patch that was made earlier. Nothing was stepped: call "
            "optimizer.step(), or offload the optimizer before it is wrapped."
        )


def _offload_of(optimizer: Optimizer) -> Offload:
    offload = optimizer.__dict__.get(PRIVATE)
    if not isinstance(offload, Offload):
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


def _load(
    offload: Offload, state: State, values: Mapping[Any, Any], groups: list[dict[str, Any]]
) -> None:
    for stale in [key for key in state if key not in values]:
        del state[stale]
    group_of = {id(p): group for group in groups for p in group["params"]}
    for parameter, saved in values.items():
        if not (isinstance(parameter, Tensor) and isinstance(saved, dict)):
            state[parameter] = copy.deepcopy(saved)
            continue
        inner = state.of(parameter)
        for key in [k for k in dict.keys(inner) if k not in saved]:
            inner.forget(key)
        for key, value in saved.items():
            group = group_of.get(id(parameter), {})
            _load_value(inner, key, value, _is_made_on_device(offload.base, key, group))
        inner.reorder(list(saved))


def _load_value(inner: ParameterState, key: str, value: Any, is_made_on_device: bool) -> None:
    if not isinstance(value, Tensor):
        inner.place(key, copy.deepcopy(value))
        return
    is_known = isinstance(dict.get(inner, key), Tensor)
    on_device = inner.is_on_device(key) if is_known else is_made_on_device
    # A host value is copied: the step advances it in place, and the saved one is not ours.
    inner.place(key, value if on_device else value.detach().cpu().clone(), on_device=on_device)


def _is_made_on_device(base: type[Optimizer], key: str, group: dict[str, Any]) -> bool:
    """Says whether a class' first step makes this state on the device.

    Where a scalar lives decides in which arithmetic it advances. Torch's own loading puts NAdam's
    ``mu_product`` on the device and ASGD's ``step`` on the host, unlike their first steps, and a
    run resumed there ends at other bits than an uninterrupted one.

    Source: ``_init_group`` of each class; ``Optimizer._process_value_according_to_param_policy``.
    """
    if key == "step":
        return bool(group.get("fused")) or issubclass(base, torch.optim.ASGD)
    return not (key == "mu_product" and issubclass(base, torch.optim.NAdam))
