"""Which states are something besides a state: a parameter, a gradient, a value of a group, an
argument of a step, or a view of one.

A state moves by itself, so what is written to the other does not reach it, nor the other way round.
The trial, an offload, a load and a step all ask here.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from residency._dtensor import local_of, locals_of
from residency._errors import RefusedError
from residency._optim._trial._copies import is_of_atoms, reachable
from residency._storages import are_apart, is_wrapper, sharing


def refuse_borrowed(
    name: str,
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[Any, object],
    *,
    refused: str = "be offloaded",
) -> None:
    """Checks that each state is a state alone.

    Args:
        name: The optimizer's class, for the error.
        groups: Its groups.
        state: Its state by parameter.
        refused: What the optimizer cannot do otherwise, for the error.

    Raises:
        RefusedError: A state is also something else.
    """
    found = borrowed(groups, state)
    if found is not None:
        raise RefusedError(
            f"{name} cannot {refused}: its state {found}, and a state moves by itself. Nothing was "
            "changed: keep a copy in the state (`clone()`), or keep the state on the device."
        )


def borrowed(
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[Any, object],
    arguments: Mapping[str, object] | None = None,
) -> str | None:
    """Returns which state is also something else, and what, in words; None where none is.

    Args:
        groups: The groups of an optimizer, or of a part of it.
        state: The state by parameter.
        arguments: What its step was given, by name.
    """
    parameters = [parameter for group in groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    beside = [
        (f"the {name!r} of a group", value)
        for group in groups
        for name, value in group.items()
        if name != "params"
    ]
    beside += [(f"the argument {name!r} of the step", v) for name, v in (arguments or {}).items()]
    mine = [
        (key, value)
        for values in state.values()
        for key, value in (dict.items(values) if isinstance(values, dict) else [("", values)])
    ]
    if _are_plainly_apart([value for _, value in mine + beside], parameters + gradients):
        return None  # as nearly always
    owners = [("a parameter", each) for each in parameters]
    owners += [("a gradient", each) for each in gradients]
    owners += [(name, each) for name, value in beside for each in reachable(value)]
    states = [(key, each) for key, value in mine for each in reachable(value)]
    found = _one_object(states, owners) or _same_bytes(states, owners)
    return found and f"{found[0]!r} is also {found[1]}, or a view of it"


def _are_plainly_apart(values: Sequence[object], others: Sequence[Tensor]) -> bool:
    """Returns whether values are nothing but numbers and tensors that lie apart from one another
    and from others; asked of all at every step.
    """
    tensors = [value for value in values if isinstance(value, Tensor)]
    rest = [value for value in values if value is not None and not isinstance(value, Tensor)]
    if not all(isinstance(value, int | float | str) or is_of_atoms(value) for value in rest):
        return False
    tensors += others
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return False
    local = locals_of(tensors)
    return not any(map(is_wrapper, local)) and are_apart(local)


def _one_object(
    states: Iterable[tuple[str, object]], owners: Iterable[tuple[str, object]]
) -> tuple[str, str] | None:
    owner_of = {id(each): owner for owner, each in owners if _is_changeable(each)}
    return next(((key, owner_of[id(each)]) for key, each in states if id(each) in owner_of), None)


def _same_bytes(
    states: Iterable[tuple[str, object]], owners: Iterable[tuple[str, object]]
) -> tuple[str, str] | None:
    mine, theirs = list(_with_bytes(states)), list(_with_bytes(owners))
    tensors = [tensor for _, tensor in (*mine, *theirs)]
    for near in sharing(tensors):
        if near[0] < len(mine) <= near[-1]:
            return mine[near[0]][0], theirs[near[-1] - len(mine)][0]
    return None


def _with_bytes(named: Iterable[tuple[str, object]]) -> Iterator[tuple[str, Tensor]]:
    for name, value in named:
        if isinstance(value, Tensor) and value.layout is torch.strided:
            local = local_of(value)
            # Of a class before the bytes of others, the trial says that it is one.
            if not (local.is_meta or is_wrapper(local)):
                yield name, local


def _is_changeable(value: object) -> bool:
    """Returns whether an object is one that code may change in place."""
    if isinstance(value, Tensor | list | dict | set | deque):
        return True
    if isinstance(value, enum.Enum | tuple) or callable(value):
        return False
    try:
        return not memoryview(value).readonly  # type: ignore[arg-type]  # arrays have one
    except TypeError:
        return hasattr(value, "__dict__")
