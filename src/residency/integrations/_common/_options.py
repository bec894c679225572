"""The options of an optimizer that a configuration names, with those of ``offload_optimizer``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from torch.optim import Optimizer

from residency._optim import offload_optimizer

OURS = frozenset(inspect.signature(offload_optimizer).parameters) - {"optimizer"}


def options_of(base: type[Optimizer]) -> frozenset[str]:
    """Returns the names of the options that an optimizer's class takes."""
    return frozenset(inspect.signature(base).parameters) - {"params"}


def unknown_options(base: type[Optimizer], options: Mapping[str, object]) -> list[str]:
    """Returns the options that neither the class takes nor ``offload_optimizer``."""
    return sorted(options.keys() - options_of(base) - OURS)
