"""Keeps a PyTorch training run inside its memory at every transition; never changes a result.

The public door. Each name is imported when it is first asked for: importing this package
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
from residency._lazy import door

if TYPE_CHECKING:
    from residency._checkpoint import Checkpointer, Retention, load_into, snapshot
    from residency._frozen import stream_frozen
    from residency._handoff import hand_off, reclaim, take_over
    from residency._memory import holders, memory_state, phase, record
    from residency._optim import OffloadedOptimizer, offload_optimizer, onload_optimizer
    from residency._park import park, parked, unpark
    from residency._transfer import mutating

__version__ = "0.1.0"

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
    "parked",
    "phase",
    "reclaim",
    "record",
    "sim",
    "snapshot",
    "stream_frozen",
    "take_over",
    "testing",
    "unpark",
]

_SUBMODULES = frozenset({"optim", "sim", "testing", "types"})
_NAMES = {
    "_checkpoint": ["Checkpointer", "Retention", "load_into", "snapshot"],
    "_frozen": ["stream_frozen"],
    "_handoff": ["hand_off", "reclaim", "take_over"],
    "_memory": ["holders", "memory_state", "phase", "record"],
    "_optim": ["OffloadedOptimizer", "offload_optimizer", "onload_optimizer"],
    "_park": ["park", "parked", "unpark"],
    "_transfer": ["mutating"],
}


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name == "Checkpointer":  # it asks offloaded optimizers which states are to come
        importlib.import_module("residency._optim")
    return door(__name__, _NAMES)(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
