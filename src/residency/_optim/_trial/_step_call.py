"""The arguments of one step, as each part of it gets them.

A part gets what one value says for all parameters: numbers, texts, scalar tensors. A closure is
evaluated once, before the parts, which get its result. All else may have an entry for each
parameter, or an answer that depends on all of them, and is refused.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from residency._errors import RefusedError
from residency._optim._trial._copies import on_host

_VALUES = (Number, str, bytes, type, enum.Enum, torch.dtype, torch.device)


def raw_step(base: type[Optimizer]) -> Callable[..., Any]:
    """Returns a class' ``step`` without the layer that runs the hooks.

    Source: torch wraps exactly the outermost layer (``Optimizer._patch_step_function``); the
    ``no_grad`` layers inside belong to the step.
    """
    step: Any = base.step
    raw: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return raw


@dataclass(frozen=True, slots=True)
class StepCall:
    """The arguments of a step.

    Attributes:
        values: By the names of the class' own ``step``, those by position first.
        num_by_position: How many are given by position.
        closure_name: Which of them is the closure, if one is.
    """

    values: Mapping[str, object] = field(default_factory=dict)
    num_by_position: int = 0
    closure_name: str | None = None

    @classmethod
    def of(
        cls, base: type[Optimizer], args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> StepCall:
        """Takes a call in.

        Args:
            base: The class whose ``step`` is called.
            args: Its arguments by position, without the optimizer.
            kwargs: Those by name.

        Raises:
            TypeError: The class' own step does not take them.
            RefusedError: One is such as parts cannot be given.
        """
        if not (args or kwargs):
            return cls()
        signature = inspect.signature(raw_step(base))
        signature.bind(None, *args, **kwargs)
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [name for name, each in signature.parameters.items() if each.kind in kinds][1:]
        names += [f"*{index}" for index in range(len(names), len(args))]
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        closures = [name for name, value in values.items() if _is_closure(value)]
        for name, value in values.items():
            if name not in closures[:1] and not _is_one_for_all(value):
                raise RefusedError(
                    f"{base.__name__}.step was given a {type(value).__name__} for {name!r}, and a "
                    "part of the parameters cannot be given a part of it. Nothing was stepped: "
                    "pass numbers, texts, scalar tensors and one closure, or call onload_optimizer "
                    "first."
                )
        return cls(values, len(args), next(iter(closures), None))

    @property
    def closure(self) -> Callable[[], object] | None:
        """The closure that is to be evaluated before the parts."""
        found = None if self.closure_name is None else self.values[self.closure_name]
        return found if callable(found) else None

    @property
    def kind(self) -> Hashable:
        """What is equal for calls that make a step do the same things."""
        return tuple(
            (name, type(value), name == self.closure_name or _switch_of(value))
            for name, value in self.values.items()
            if value is not None or name != "closure"
        )

    def after(self, loss: object) -> StepCall:
        """Returns the call with a closure that gives back what the evaluated one returned."""
        return self._with_closure(lambda: loss)

    def on_trial(self, evaluated: Callable[[], None]) -> StepCall:
        """Returns the call for steps of small host tensors.

        Args:
            evaluated: Is called with each evaluation of the closure.
        """

        def stub() -> Tensor:
            evaluated()
            return torch.ones(())

        values = {k: on_host(v) if isinstance(v, Tensor) else v for k, v in self.values.items()}
        return replace(self, values=values)._with_closure(stub)

    def _with_closure(self, closure: Callable[[], object]) -> StepCall:
        if self.closure_name is None:
            return self
        return replace(self, values={**self.values, self.closure_name: closure})

    def run(self, base: type[Optimizer], optimizer: Optimizer, values: Mapping[str, object]) -> Any:
        """Runs a class' own step with these arguments, or copies of them."""
        given = list(values.items())
        by_position = [value for _, value in given[: self.num_by_position]]
        return raw_step(base)(optimizer, *by_position, **dict(given[self.num_by_position :]))


NO_ARGUMENTS = StepCall()


def _is_closure(value: object) -> bool:
    if not callable(value) or isinstance(value, type | torch.nn.Module):
        return False
    try:
        inspect.signature(value).bind()
    except TypeError:
        return False
    except ValueError:  # no signature is known
        return True
    return True


def _is_one_for_all(value: object) -> bool:
    if isinstance(value, Tensor):
        return type(value) is Tensor and value.numel() == 1
    return value is None or isinstance(value, _VALUES)


def _switch_of(value: object) -> object:
    """Returns what of a value may switch a part of a step on; of a number only whether it is 0."""
    if isinstance(value, Tensor):
        return value.dtype
    return bool(value) if isinstance(value, Number) else value
