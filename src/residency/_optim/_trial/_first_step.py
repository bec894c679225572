"""What state an optimizer's first step makes for a parameter, known before that step.

The step is tried out on a meta tensor of the parameter's own shape, which has no bytes, so that a
class that treats large tensors in another way shows it. A step that reads a value fails there, as
some do after they made their state; then a step on a small host tensor says whether that was all of
it. Invariant, which ``tests/optim/test_foreign.py`` tries to break: neither the optimizer nor
torch's random state is changed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from residency._dtensor import is_sharded, layout_of, local_of, wrapped_like
from residency._modes import callers_modes_off
from residency._optim._masters import MASTER, master_like
from residency._optim._trial._generators import generators_kept
from residency._optim._trial._partial_step import (
    Commit,
    is_torchs_own,
    shadow_step,
    stand_in,
)
from residency._optim._trial._separable import host_group
from residency._optim._trial._step_call import NO_ARGUMENTS, StepCall
from residency._transfer import align_up

_SMALL = 8  # a side of the real tensor that is stepped where meta tensors cannot be
_NUM_LATER_STEPS = 7  # with the first, eight: some classes make a state in their fifth step


@dataclass(frozen=True, slots=True)
class Schema:
    """The state that a first step makes for one parameter.

    Attributes:
        device: By key, what it keeps on the device, as meta tensors (a ``DTensor`` around one).
        values: All that it makes, by key, in the order in which it does; those of ``device`` too.
        later: What the steps right after it make besides, of the kind of ``device``.
        unseen: Keys of ``device`` that may be scalars of the host: they are counted all the same.
    """

    device: dict[str, Tensor]
    values: dict[str, Any] = field(default_factory=dict)
    later: dict[str, Tensor] = field(default_factory=dict)
    unseen: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class StateSize:
    """The bytes that a parameter's state takes in a slot or a slab.

    Attributes:
        num_bytes: Of the whole parameter, each state rounded up to the alignment.
        itemsizes: Bytes per element of each state that has dimensions.
        num_scalars: States without dimensions.
    """

    num_bytes: int
    itemsizes: tuple[int, ...]
    num_scalars: int

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> StateSize:
        """Returns the size of a state that consists of ``tensors``."""
        found = list(tensors)
        large = [t for t in found if t.dim() > 0]
        return cls(
            sum(planned_bytes(t) for t in found),
            tuple(t.element_size() for t in large),
            len(found) - len(large),
        )


class Schemas:
    """The schemas of one optimizer: parameters that are alike have one, from one trial."""

    def __init__(self) -> None:
        self._found: dict[tuple[Hashable, ...], Schema | None] = {}

    def of(
        self,
        optimizer: Optimizer,
        base: type[Optimizer],
        group: Mapping[str, Any],
        parameter: Tensor,
        *,
        is_local: bool,
        has_master: bool = False,
        call: StepCall = NO_ARGUMENTS,
    ) -> Schema | None:
        """Returns what ``state_schema`` does; the optimizer and its class are always the same."""
        key = _kind_of(base, group, parameter), is_local, has_master, call.kind
        if key not in self._found:
            self._found[key] = state_schema(
                optimizer,
                base,
                group,
                parameter,
                is_local=is_local,
                has_master=has_master,
                call=call,
            )
        return self._found[key]

    def forget_others(self, base: type[Optimizer], groups: Collection[Mapping[str, Any]]) -> None:
        """Forgets what no parameter of these groups is like."""
        here = {_kind_of(base, group, p) for group in groups for p in group["params"]}
        self._found = {key: made for key, made in self._found.items() if key[0] in here}

    def clear(self) -> None:
        """Forgets all of them."""
        self._found.clear()

    def __len__(self) -> int:
        return len(self._found)


def _kind_of(base: type[Optimizer], group: Mapping[str, object], parameter: Tensor) -> Hashable:
    """Returns what is equal for parameters of which the first steps make the same."""
    # How fast the steps of torch's own classes go decides no state; layers may have each its rate.
    rates = ("lr", "initial_lr") if is_torchs_own(base) else ()
    settings = tuple(
        (name, type(value) if name in rates else _exact(value))
        for name, value in group.items()
        if name != "params"
    )
    return settings, layout_of(parameter), local_of(parameter).stride()


def _exact(value: object) -> Hashable:
    if isinstance(value, tuple):
        return type(value), tuple(map(_exact, value))
    # 1, 1.0 and True are equal. What is no plain value is like itself alone.
    is_plain = value is None or isinstance(value, bool | int | float | complex | str)
    return type(value), value if is_plain else id(value)


def state_schema(
    optimizer: Optimizer,
    base: type[Optimizer],
    group: Mapping[str, object],
    parameter: Tensor,
    *,
    is_local: bool,
    has_master: bool = False,
    call: StepCall = NO_ARGUMENTS,
) -> Schema | None:
    """Returns what the first step will make for a parameter.

    Args:
        optimizer: Is not changed.
        base: The class that it has, or had before it was offloaded.
        group: The parameter's group.
        parameter: One without state.
        is_local: Whether the step sees a sharded parameter's local tensor.
        has_master: Whether it sees a float32 master instead, which is then part of the state.
        call: What the step is called with.

    Returns:
        None where it cannot be known.
    """
    with callers_modes_off(), torch.enable_grad(), generators_kept():
        seen = local_of(parameter) if is_local else parameter
        stand = torch.empty_strided(
            seen.shape,
            seen.stride(),
            dtype=torch.float32 if has_master else seen.dtype,
            device="meta",
        )
        on_trial = call.on_trial(lambda: None)
        schema = _tried_out(optimizer, base, dict(group), parameter, stand, on_trial)
        if schema is None or not has_master:
            return schema
        master = {MASTER: master_like(parameter)}
        return replace(
            schema, device={**master, **schema.device}, values={**master, **schema.values}
        )


def _tried_out(
    optimizer: Optimizer,
    base: type[Optimizer],
    group: dict[str, object],
    parameter: Tensor,
    stand: Tensor,
    call: StepCall,
) -> Schema | None:
    found, is_whole, later = _state_after(optimizer, base, group, stand, call)
    is_fused = bool(group.get("fused"))
    made = {
        key: torch.empty_like(value, device="meta", memory_format=torch.preserve_format)
        for key, value in found.items()
        # Fused steps keep `step` on the device; on meta tensors none is fused.
        if isinstance(value, Tensor) and (not value.is_cpu or (key == "step" and is_fused))
    }
    unseen: frozenset[str] = frozenset()
    if not is_whole:
        small = torch.ones([_SMALL] * parameter.dim(), dtype=stand.dtype)
        states, is_whole, _ = _state_after(optimizer, base, group, small, call)
        if not is_whole:
            return None
        if states.keys() != found.keys():
            scaled = _scaled(states, small, stand)
            if scaled is None:
                return None
            found, made = states, scaled
            unseen = frozenset(key for key, value in scaled.items() if value.dim() == 0)
    device = _as_shards(made, stand, parameter)
    if device is None:
        return None
    later = _as_shards(later, stand, parameter) or {}
    return Schema(device, {**found, **device}, later, unseen)


def _scaled(states: dict[str, object], small: Tensor, stand: Tensor) -> dict[str, Tensor] | None:
    made: dict[str, Tensor] = {}
    for key, value in states.items():
        if not isinstance(value, Tensor):
            continue
        if value.dim() > 0 and value.shape != small.shape:
            return None
        # Whether a scalar stays on the host is not to be seen there: count it as if it did not.
        made[key] = torch.empty_like(
            stand if value.dim() > 0 else value.to("meta"), dtype=value.dtype
        )
    return made


def _as_shards(
    made: dict[str, Tensor], stand: Tensor, parameter: Tensor
) -> dict[str, Tensor] | None:
    """Returns the states of a sharded parameter as the shards that they are; None where one has
    another shape, whose placements only the step knows.
    """
    if not is_sharded(parameter):
        return made
    local = local_of(parameter)
    shards: dict[str, Tensor] = {}
    for key, value in made.items():
        if value.dim() > 0 and value.shape != stand.shape:
            return None
        like = torch.empty_like(local, dtype=value.dtype, device="meta")
        shards[key] = wrapped_like(like, parameter) if value.dim() > 0 else value
    return shards


def _state_after(
    optimizer: Optimizer,
    base: type[Optimizer],
    group: dict[str, object],
    stand: Tensor,
    call: StepCall,
) -> tuple[dict[str, object], bool, dict[str, Tensor]]:
    """Returns the state that a first step makes for a stand-in, whether it ended well, and what
    later steps of a class outside of torch make on the device.
    """
    later: dict[str, Tensor] = {}
    first: dict[str, Any] = {}
    is_whole = False
    state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
    try:
        made = torch.nn.Parameter(stand)
        made.grad = torch.ones_like(stand)
        lender = optimizer
        if not is_torchs_own(base):
            lender = stand_in(optimizer, base, parameter_of=lambda _: made)
        groups = [{**host_group(group, base), "params": [made]}]
        if lender is not optimizer:
            lender.param_groups = groups
        outcome = shadow_step(lender, base, groups, state, False, call)
        is_whole = True  # whatever becomes of the later ones
        first = dict(next(iter(state.values()), {}))
        for _ in range(_NUM_LATER_STEPS if lender is not optimizer else 0):
            commit = Commit(lender)
            commit.add(outcome)
            commit.write()
            outcome = shadow_step(lender, base, groups, state, False, call)
            for key, value in next(iter(state.values()), {}).items():
                if key not in first and isinstance(value, Tensor) and not value.is_cpu:
                    later[key] = torch.empty_like(value, device="meta")
    except Exception:  # whatever it is, the step itself will say it
        first = first or next(iter(state.values()), {})
    return first, is_whole, later


def planned_bytes(tensor: Tensor) -> int:
    """Returns the bytes that the largest shard of any rank takes, rounded up to the alignment.

    Plans count these, so that ranks with uneven shards plan alike: a step on ``DTensor`` has
    collectives, and they must come in one order everywhere.
    """
    count = tensor.numel()
    if is_sharded(tensor):
        lengths = list(tensor.shape)
        mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
        for dim, placement in enumerate(tensor.placements):  # type: ignore[attr-defined]
            if placement.is_shard():
                lengths[placement.dim] = -(-lengths[placement.dim] // mesh.size(dim))
        count = torch.Size(lengths).numel()
    return align_up(count * tensor.element_size())
