"""Restores the values of an optimizer's groups, such as rates.

A rate that is a tensor here stays that tensor, as graphs that were captured and code that was
compiled read it. One tensor may be the rate of several groups: where other rates were saved for
them, the first group keeps it and each other one gets its own, as with the optimizer's own
``load_state_dict``, which gives each group what was saved for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from residency._checkpoint._document._decode import pairs_if_alike
from residency._checkpoint._document._nodes import COMPLEX, FLOAT, INT, TENSOR, Node, kind_of
from residency._checkpoint._restore._overlaps import is_same_stored
from residency._checkpoint._restore._plan import RestorePlan, difference, target_of
from residency._checkpoint._restore._values import SavedValue, senseless_is_damage, understood
from residency._checkpoint._sources._source import StoredTensor
from residency._dtensor import local_of
from residency._modes import callers_modes_off
from residency._storages import storage_key
from residency._transfer import copy_across

_HOW = frozenset({"foreach", "fused", "capturable", "differentiable"})
_NUMBERS = (FLOAT, INT, COMPLEX)


def plan_group(
    plan: RestorePlan, path: str, saved: Mapping[str, Node], group: dict[str, Any]
) -> dict[str, Tensor | SavedValue]:
    """Plans what is saved of one group; returns what is to stand in it, for ``put_group``."""
    return {
        key: _value(plan, f"{path}.{key}", node, group.get(key))
        for key, node in saved.items()
        if key not in _HOW or key not in group
    }


def put_group(group: dict[str, Any], planned: Mapping[str, Tensor | SavedValue]) -> None:
    """Puts values into a group, once bytes are there."""
    device = next((p.device for p in group["params"]), None)
    for key, each in planned.items():
        if isinstance(each, Tensor):
            group[key] = each
        elif isinstance(group.get(key), float):
            group[key] = _as_number(each())
        else:
            group[key] = each(device)


def _value(plan: RestorePlan, path: str, node: Node, before: object) -> Tensor | SavedValue:
    """Plans one value; returns the tensor that is filled, or what is understood."""
    shards = _stored(plan, path, node, before) if isinstance(before, Tensor) else None
    if not isinstance(before, Tensor) or shards is None:
        return plan.value(node, path)
    home = _home(plan, before, node)
    target = target_of(path, home, shards)
    if difference(target) is None:
        plan.targets.append(target)
    else:  # of another dtype
        plan.after.append(partial(_copy_value, home, plan.value(node, path)))
    return home


def _copy_value(home: Tensor, value: SavedValue) -> None:
    copy_across(home, value())


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
