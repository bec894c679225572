"""Runs an optimizer's own step on a part of its parameters, without touching the optimizer.

A shadow is an instance of the same class with the same attributes, but its own ``state`` and
``param_groups``, restricted to the part; its hooks are empty. Invariant: the user's object is never
half-stepped, and what the step changes outside of state (group values, attributes) is committed
once, after all parts, and only when all parts agree.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from residency._errors import ResidencyError

PRIVATE = "_residency"


def raw_step(base: type[Optimizer]) -> Callable[..., Any]:
    """Returns a class' ``step`` without the layer that runs the hooks.

    Source: torch wraps exactly the outermost layer (``Optimizer._patch_step_function``); the
    ``no_grad`` layers inside belong to the step.
    """
    step: Any = base.step
    raw: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return raw


@contextlib.contextmanager
def quiet_global_hooks() -> Iterator[None]:
    """Silences the hooks that torch keeps for all optimizers: a subclass' ``super().step()`` runs
    them.
    """
    hooks: tuple[Any, Any] = (
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    saved = [OrderedDict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, before in zip(hooks, saved, strict=True):
            each.update(before)


@dataclass(slots=True)
class Outcome:
    """Is what one shadow step left behind."""

    state: Mapping[Tensor, dict[str, Any]]
    group_values: list[dict[str, Any]]
    attributes: dict[str, Any]


def shadow_step(
    optimizer: Optimizer,
    base: type[Optimizer],
    groups: Sequence[dict[str, Any]],
    state: Mapping[Tensor, dict[str, Any]],
) -> Outcome:
    """Steps some parameters with the optimizer's own code.

    Args:
        optimizer: Lends its attributes; is not changed.
        base: The class whose step runs.
        groups: All groups, each with the parameters of this part only.
        state: The state of those parameters, on the device that the step expects.

    Returns:
        The state after the step, and the group values and attributes that it replaced.
    """
    shadow = object.__new__(base)
    shadow.__dict__.update(optimizer.__dict__)
    for name in ("step", PRIVATE):
        shadow.__dict__.pop(name, None)
    shadow._optimizer_step_pre_hooks = OrderedDict()
    shadow._optimizer_step_post_hooks = OrderedDict()
    shadow.state = defaultdict(dict, state)
    shadow.param_groups = [dict(group) for group in groups]
    before = dict(shadow.__dict__)
    raw_step(base)(shadow)
    attributes = {
        name: value
        for name, value in shadow.__dict__.items()
        if name not in ("state", "param_groups") and before.get(name, shadow) is not value
    }
    values = [
        {
            name: value
            for name, value in after.items()
            if name != "params" and group.get(name, shadow) is not value
        }
        for group, after in zip(groups, shadow.param_groups, strict=True)
    ]
    return Outcome(shadow.state, values, attributes)


class Commit:
    """Collects what the parts of a step replaced outside of state, and writes it to the optimizer
    once.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._first: Outcome | None = None

    def add(self, outcome: Outcome) -> None:
        """Takes a part's outcome.

        Raises:
            ResidencyError: It differs from the first part's, so the step couples its parameters.
        """
        if self._first is None:
            self._first = Outcome({}, outcome.group_values, outcome.attributes)
            return
        pairs = [
            ("attribute", self._first.attributes, outcome.attributes),
            *(
                (f"value of param_groups[{i}]", a, b)
                for i, (a, b) in enumerate(
                    zip(self._first.group_values, outcome.group_values, strict=True)
                )
            ),
        ]
        for what, first, other in pairs:
            for name in first.keys() | other.keys():
                if not _is_equal(first.get(name), other.get(name)):
                    raise ResidencyError(
                        f"{type(self._optimizer).__name__}.step left the {what} {name!r} at "
                        f"{first.get(name)!r} for one part of the parameters and at "
                        f"{other.get(name)!r} for another, so it cannot be stepped in parts. "
                        "Some parameters have been stepped: reload a checkpoint, and do not "
                        "offload it."
                    )

    def write(self) -> None:
        """Writes the agreed values to the optimizer."""
        if self._first is None:
            return
        groups = self._optimizer.param_groups
        for group, values in zip(groups, self._first.group_values, strict=True):
            group.update(values)
        self._optimizer.__dict__.update(self._first.attributes)


def _is_equal(left: Any, right: Any) -> bool:
    if left is right:
        return True
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return (
            isinstance(left, Tensor)
            and isinstance(right, Tensor)
            and left.device == right.device
            and left.dtype == right.dtype
            and torch.equal(left, right)
        )
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_is_equal(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(_is_equal, left, right))
    return bool(left == right)
