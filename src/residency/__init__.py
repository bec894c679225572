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
    InvalidArgumentError,
    RefusedError,
    ResidencyError,
)

if TYPE_CHECKING:
    from residency._checkpoint import Checkpointer, Retention, Save, Snapshot, load_into, snapshot
    from residency._memory import (
        Holder,
        MemoryState,
        holders,
        memory_state,
        phase,
        record,
    )
    from residency._optim import OffloadedOptimizer, offload_optimizer, onload_optimizer
    from residency._transfer import mutating

__version__ = "0.1.0.dev0"

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "CorruptSaveError",
    "Holder",
    "InvalidArgumentError",
    "MemoryState",
    "OffloadedOptimizer",
    "RefusedError",
    "ResidencyError",
    "Retention",
    "Save",
    "Snapshot",
    "__version__",
    "holders",
    "load_into",
    "memory_state",
    "mutating",
    "offload_optimizer",
    "onload_optimizer",
    "phase",
    "record",
    "sim",
    "snapshot",
    "testing",
]

_LAZY_SUBMODULES = frozenset({"sim", "testing"})
_LAZY_NAMES = {  # name -> the module that owns it
    "Checkpointer": "residency._checkpoint",
    "Holder": "residency._memory",
    "MemoryState": "residency._memory",
    "OffloadedOptimizer": "residency._optim",
    "Retention": "residency._checkpoint",
    "Save": "residency._checkpoint",
    "Snapshot": "residency._checkpoint",
    "holders": "residency._memory",
    "load_into": "residency._checkpoint",
    "memory_state": "residency._memory",
    "mutating": "residency._transfer",
    "offload_optimizer": "residency._optim",
    "onload_optimizer": "residency._optim",
    "phase": "residency._memory",
    "record": "residency._memory",
    "snapshot": "residency._checkpoint",
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
