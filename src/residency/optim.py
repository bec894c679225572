"""The optimizers of ``torch.optim``, made with their state on the host.

Tools that take the dotted path of an optimizer's class can use them:
``residency.optim.AdamW(params, lr=1e-3, bucket="64MiB")`` is
``residency.offload_optimizer(torch.optim.AdamW(params, lr=1e-3), bucket="64MiB")``. Each class of
``torch.optim`` is here under its own name, and takes the options of both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch.optim import Optimizer

from residency._errors import InvalidArgumentError
from residency._optim import OffloadedOptimizer, offload_optimizer

_OURS = tuple(
    each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
    for each in inspect.signature(offload_optimizer).parameters.values()
    if each.name != "optimizer"
)


class _Maker(type):
    """The type of these classes: a call makes an optimizer of the class below, and offloads it."""

    def __new__(cls, name: str, bases: tuple[type, ...], space: dict[str, object]) -> _Maker:
        if any(isinstance(base, _Maker) for base in bases):
            raise InvalidArgumentError(
                f"{name} cannot be a subclass of {bases[0].__qualname__}, which makes optimizers "
                "of another class. Make it one of torch.optim's, and give an optimizer of it to "
                "residency.offload_optimizer."
            )
        return super().__new__(cls, name, bases, space)

    def __call__(cls, *arguments: object, **options: Any) -> OffloadedOptimizer:
        base: Any = cls.__base__
        unknown = sorted(options.keys() - inspect.signature(cls).parameters.keys())
        if unknown:
            ours = sorted(each.name for each in _OURS)
            theirs = sorted(inspect.signature(base).parameters.keys() - {"params"})
            raise InvalidArgumentError(
                f"{__name__}.{cls.__name__} has no option {', '.join(map(repr, unknown))}. It has "
                f"the options of residency.offload_optimizer, which are {', '.join(ours)}, and of "
                f"torch.optim.{cls.__name__}, which are {', '.join(theirs)}."
            )
        own = {each.name: options.pop(each.name) for each in _OURS if each.name in options}
        made = offload_optimizer(base(*arguments, **options), **own)
        assert isinstance(made, OffloadedOptimizer)
        return made

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, OffloadedOptimizer) and cls.__base__ in type(value).__mro__


@cache
def _classes() -> dict[str, _Maker]:
    """Returns the class of each name."""
    bases = {
        name: value
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
    }
    return {name: _made_of(base) for name, base in bases.items()}


def _made_of(base: type[Optimizer]) -> _Maker:
    made = _Maker(base.__name__, (base,), {"__module__": __name__, "__init__": _init_of(base)})
    made.__signature__ = _with_ours(base)  # type: ignore[attr-defined]
    made.__doc__ = f"""``torch.optim.{base.__name__}`` whose state lives on the host.

    Takes the options of it and of `residency.offload_optimizer`. Raises the errors of both, and
    needs their memory.

    Raises:
        InvalidArgumentError: Neither of the two has an option of this name.
    """
    return made


def _init_of(base: Any) -> Callable[..., None]:
    """Returns an ``__init__`` for tools that ask it which options there are. It is never called."""

    def init(self: object, *args: object, **options: object) -> None:
        base.__init__(self, *args, **options)

    init.__signature__ = _with_ours(base.__init__)  # type: ignore[attr-defined]
    return init


def _with_ours(call: Callable[..., object]) -> inspect.Signature:
    """Returns the signature of a call with the options of `offload_optimizer` behind it."""
    signature = inspect.signature(call)
    return signature.replace(parameters=[*signature.parameters.values(), *_OURS])


def __getattr__(name: str) -> type[OffloadedOptimizer]:
    if name not in _classes():
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; it has the classes of torch.optim: "
            f"{', '.join(sorted(_classes()))}"
        )
    return cast(type[OffloadedOptimizer], _classes()[name])  # of what a call makes


def __dir__() -> list[str]:
    return sorted(_classes())
