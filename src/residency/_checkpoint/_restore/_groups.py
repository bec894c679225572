"""Restores the values of an optimizer's groups, such as rates.

A rate that is a tensor here stays that tensor, as graphs that were captured and code that was
compiled read it. One tensor may be the rate of several groups: where other rates were saved for
them, the first group keeps it and each other one gets its own, as with the optimizer's own
``load_state_dict``, which gives each group what was saved for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from residency._checkpoint._document._decode import pairs_if_alike
from residency._checkpoint._document._nodes import COMPLEX, FLOAT, INT, TENSOR, Node, kind_of
from residency._checkpoint._restore._overlaps import is_same_stored
from residency._checkpoint._restore._plan import RestorePlan, difference, target_of
from residency._checkpoint._restore._values import senseless_is_damage, understood
from residency._checkpoint._sources._source import StoredTensor
from residency._dtensor import local_of
from residency._modes import callers_modes_off
from residency._storages import storage_key
from residency._transfer import copy_across

_HOW = frozenset({"foreach", "fused", "capturable", "differentiable"})
_NUMBERS = (FLOAT, INT, COMPLEX)


def plan_group(
    plan: RestorePlan, path: str, saved: Mapping[str, Node], group: dict[str, Any]
) -> Callable[[], None]:
    """Plans what is saved of one group.

    Returns:
        What puts the values into the group, once bytes are there.
    """
    device = next((p.device for p in group["params"]), None)
    thunks = {
        key: _value(plan, f"{path}.{key}", node, group.get(key), device)
        for key, node in saved.items()
        if key not in _HOW or key not in group
    }

    def finish() -> None:
        for key, thunk in thunks.items():
            group[key] = thunk()

    return finish


def _value(
    plan: RestorePlan, path: str, node: Node, before: object, device: torch.device | None
) -> Callable[[], Any]:
    """Plans one value; the thunk returns what is to stand in the group."""
    shards = _stored(plan, path, node, before) if isinstance(before, Tensor) else None
    if not isinstance(before, Tensor) or shards is None:
        value = plan.value(node, path)
        is_number = isinstance(before, float)
        return lambda: _as_number(value()) if is_number else value(device)
    home = _home(plan, before, node)
    target = target_of(path, home, shards)
    if difference(target) is None:
        plan.targets.append(target)
        return lambda: home
    value = plan.value(node, path)  # of another dtype

    def finish() -> Tensor:
        copy_across(home, value())
        return home

    return finish


def _stored(
    plan: RestorePlan, path: str, node: Node, before: Tensor
) -> Sequence[StoredTensor] | None:
    """Returns what a tensor is filled with; None where something else takes its place."""
    shape = tuple(before.shape)
    if kind_of(node) == TENSOR:
        shards = plan.source.tensors[node["name"]]
        return shards if tuple(shards[0].whole_shape) == shape else None
    if type(node) not in (bool, int, float) and kind_of(node) not in _NUMBERS:
        return None
    number = understood(path, node)
    with senseless_is_damage(path), callers_modes_off():
        made = torch.full(shape, number, dtype=before.dtype, device="cpu")
    return [StoredTensor(path, made.dtype, shape, shape, (0,) * len(shape), tensor=made)]


def _home(plan: RestorePlan, before: Tensor, node: Node) -> Tensor:
    """Returns the tensor of a value: the one that is here, unless it is another value's."""
    local = local_of(before)
    place = storage_key(local), local.storage_offset(), local.shape, local.stride()
    first = plan.taken.setdefault(place, node)
    pairs = [] if first is node else pairs_if_alike(first, node)
    if pairs is not None and all(is_same_stored(plan, *pair) for pair in pairs):
        return before
    with callers_modes_off():
        return torch.empty_like(before.detach()).requires_grad_(before.requires_grad)


def _as_number(value: object) -> object:
    return value.item() if isinstance(value, Tensor) and value.dim() == 0 else value
