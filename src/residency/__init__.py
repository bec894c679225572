"""Keeps a PyTorch training run inside its memory at every transition, without changing what it
computes.

The public door. `residency.sim`, the simulated accelerator, is imported when it is first asked for:
importing this package compiles nothing and registers no device.
"""

from __future__ import annotations

import importlib
from typing import Any

from residency._errors import InvalidArgumentError, RefusedError, ResidencyError
from residency._optim import OffloadedOptimizer, offload_optimizer, onload_optimizer

__version__ = "0.1.0.dev0"

__all__ = [
    "InvalidArgumentError",
    "OffloadedOptimizer",
    "RefusedError",
    "ResidencyError",
    "__version__",
    "offload_optimizer",
    "onload_optimizer",
    "sim",
]

_LAZY_SUBMODULES = frozenset({"sim"})


def __getattr__(name: str) -> Any:
    if name in _LAZY_SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
