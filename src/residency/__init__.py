"""Keeps a PyTorch training run inside its memory at every transition, without changing what it
computes.

The public door. What it offers is imported when it is first asked for: importing this package
imports no torch, compiles nothing and registers no device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from residency._errors import (
    CheckpointError,
    CorruptSaveError,
    HandOffError,
    InvalidArgumentError,
    RefusedError,
    ResidencyError,
)

if TYPE_CHECKING:
    from residency._checkpoint import Checkpointer, Retention, load_into, snapshot
    from residency._handoff import hand_off, park, reclaim, take_over, unpark
    from residency._memory import holders, memory_state, phase, record
    from residency._optim import OffloadedOptimizer, offload_optimizer, onload_optimizer
    from residency._transfer import mutating

__version__ = "0.1.0.dev0"

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "CorruptSaveError",
    "HandOffError",
    "InvalidArgumentError",
    "OffloadedOptimizer",
    "RefusedError",
    "ResidencyError",
    "Retention",
    "hand_off",
    "holders",
    "load_into",
    "memory_state",
    "mutating",
    "offload_optimizer",
    "onload_optimizer",
    "park",
    "phase",
    "reclaim",
    "record",
    "sim",
    "snapshot",
    "take_over",
    "testing",
    "unpark",
]

_LAZY_SUBMODULES = frozenset({"sim", "testing", "types"})
_LAZY_NAMES = {  # name -> the module that owns it
    "Checkpointer": "residency._checkpoint",
    "OffloadedOptimizer": "residency._optim",
    "Retention": "residency._checkpoint",
    "hand_off": "residency._handoff",
    "holders": "residency._memory",
    "load_into": "residency._checkpoint",
    "memory_state": "residency._memory",
    "mutating": "residency._transfer",
    "offload_optimizer": "residency._optim",
    "onload_optimizer": "residency._optim",
    "park": "residency._handoff",
    "phase": "residency._memory",
    "reclaim": "residency._handoff",
    "record": "residency._memory",
    "snapshot": "residency._checkpoint",
    "take_over": "residency._handoff",
    "unpark": "residency._handoff",
}


# What a name makes use of where it is there: a checkpointer asks which states are to come.
_WITH = {"Checkpointer": "residency._optim"}


def __getattr__(name: str) -> Any:
    if name in _LAZY_SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _LAZY_NAMES:
        if name in _WITH:
            importlib.import_module(_WITH[name])
        value = getattr(importlib.import_module(_LAZY_NAMES[name]), name)
        globals()[name] = value  # found without this function from now on
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
