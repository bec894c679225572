"""Optimizers that verl builds by their name, and the guard of its hand-offs.

Named in verl's configuration, ``optimizer_impl`` is this module and ``optimizer`` is ``Offloaded``
with the name of a class of `torch.optim`. Trinity-RFT passes the same two on to verl. Neither
framework is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch.optim import Optimizer

from residency import optim
from residency._errors import InvalidArgumentError
from residency.integrations._common._framework import named_with_version
from residency.integrations._common._options import OURS, options_of, unknown_options
from residency.integrations._verl_guard import (
    GuardStatistics,
    guard_statistics,
    install_guard,
    remove_guard,
)

__all__ = ["GuardStatistics", "guard_statistics", "install_guard", "remove_guard"]

_PREFIX = "Offloaded"


@cache
def _makers() -> Mapping[str, Callable[..., Optimizer]]:
    """Returns what makes each offloaded optimizer, by the name that a configuration gives it."""
    return {_PREFIX + name: _maker(getattr(torch.optim, name)) for name in dir(optim)}


def _maker(base: type[Optimizer]) -> Callable[..., Optimizer]:
    offloading: Callable[..., Optimizer] = getattr(optim, base.__name__)

    def make(params: Iterable[Any], **options: Any) -> Optimizer:
        _check_options(base, options)
        return offloading(params, **options)

    make.__name__ = make.__qualname__ = _PREFIX + base.__name__
    make.__doc__ = offloading.__doc__
    return make


def _check_options(base: type[Optimizer], options: Mapping[str, object]) -> None:
    unknown = unknown_options(base, options)
    if unknown:
        raise InvalidArgumentError(
            f"{_PREFIX}{base.__name__} has no option {', '.join(map(repr, unknown))}. "
            f"{named_with_version('verl')} passes lr, weight_decay, betas (if the name has "
            "'adam' in it) and the keys of override_optimizer_config: "
            f"{', '.join(sorted(OURS))}, or options of torch.optim.{base.__name__}, which are "
            f"{', '.join(sorted(options_of(base)))}."
        )


def __getattr__(name: str) -> Callable[..., Optimizer]:
    if name in _makers():
        return _makers()[name]
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}; for {named_with_version('verl')} it has "
        f"{', '.join(sorted(_makers()))}"
    )


def __dir__() -> list[str]:
    return sorted({*globals(), *_makers()})
