"""Calls an optimizer's own ``load_state_dict`` with the states that are there already, and keeps
torch's part of it from casting and copying them. [Note: an object's own pair]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from residency._dtensor import moved
from residency._transfer import copy_across


def load_through(optimizer: Optimizer, others: Mapping[str, object], *, is_plain: bool) -> None:
    """Lets an optimizer take its state, of which all but ``others`` is in place.

    Args:
        optimizer: One with a ``load_state_dict`` of its own, or with hooks.
        others: What its state dict has beside ``state`` and ``param_groups``.
        is_plain: Whether it keeps its state itself; else its owner takes what is there as it is.

    Memory:
        What the optimizer's own methods make. Of an offloaded one, none beside its homes.
    """
    numbers: dict[object, int] = {}
    groups = []
    for group in optimizer.param_groups:
        params = [numbers.setdefault(p, len(numbers)) for p in group["params"]]
        groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": params})
    state: dict[object, object] = {
        numbers[key] if isinstance(key, Tensor) and key in numbers else key: (
            dict(values) if isinstance(values, dict) else values
        )
        for key, values in optimizer.state.items()
    }
    before = [dict(group) for group in optimizer.param_groups]
    given = {"state": state, "param_groups": groups, **others}
    if is_plain:
        _InPlace(optimizer, state).load(given)
    else:
        optimizer.load_state_dict(given)
    for old, group in zip(before, optimizer.param_groups, strict=False):
        for key, value in old.items():
            # A rate that a schedule or a graph holds.
            if isinstance(value, Tensor) and group.get(key) is not value:
                _keep(group, key, value)


class _InPlace:
    """One call of a plain optimizer's ``load_state_dict``, of which torch's part makes no copies.

    Torch's part takes the state out of the dict when all hooks have seen it, and sets it by
    ``__setstate__``: in between stands this.

    Attributes:
        adapted: The state dict as the hooks left it; None where torch's part did not run.
    """

    def __init__(self, optimizer: Optimizer, state: Mapping[object, object]) -> None:
        self._optimizer = optimizer
        self._there = {id(v) for values in state.values() for v in _values_of(values)}
        self.adapted: Mapping[str, Any] | None = None

    def load(self, state_dict: dict[str, object]) -> None:
        """Calls the method."""
        optimizer = self._optimizer
        handle = optimizer.register_load_state_dict_pre_hook(self._take_state)  # the last one
        vars(optimizer)["__setstate__"] = self._set_state
        try:
            optimizer.load_state_dict(state_dict)
        finally:
            handle.remove()
            vars(optimizer).pop("__setstate__", None)

    def _take_state(self, optimizer: Optimizer, found: dict[str, Any]) -> dict[str, Any]:
        self.adapted = found
        return {**found, "state": {}}

    def _set_state(self, values: dict[str, Any]) -> None:
        optimizer = self._optimizer
        vars(optimizer).pop("__setstate__", None)
        if self.adapted is not None:
            numbers = [n for group in self.adapted["param_groups"] for n in group["params"]]
            parameters = [p for group in values["param_groups"] for p in group["params"]]
            of_number = dict(zip(numbers, parameters, strict=True))
            found = {
                of_number.get(key, key): self._placed(of_number.get(key), each)
                for key, each in self.adapted["state"].items()
            }
            state: Any = optimizer.state
            state.clear()
            state.update(found)
            values = {**values, "state": state}
        optimizer.__setstate__(values)

    def _placed(self, parameter: Tensor | None, values: object) -> object:
        """Returns a parameter's values; what a hook has made goes to the parameter."""
        if parameter is None or not isinstance(values, dict):
            return values
        return {
            key: moved(each, parameter.device)
            if isinstance(each, Tensor) and each.dim() and id(each) not in self._there
            else each
            for key, each in values.items()
        }


def _values_of(values: object) -> list[object]:
    return list(values.values()) if isinstance(values, dict) else []


def _keep(group: dict[str, Any], key: str, there: Tensor) -> None:
    """Writes a value of a group into the tensor that was there, where it fits."""
    found = group.get(key, there)
    if not isinstance(found, Tensor):
        there.fill_(found)
    elif found.shape == there.shape:
        copy_across(there, found)
    else:
        return
    group[key] = there
