"""What the device's memory is used for: states, phases, the record of a run, and its growth.

Nothing here is imported before it is asked for: reports read recordings without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from residency._memory._holders import Holder, holders
    from residency._memory._ledger import Ledger
    from residency._memory._phase import Visit, phase
    from residency._memory._record import record
    from residency._memory._state import MemoryState, memory_state

__all__ = ["Holder", "Ledger", "MemoryState", "Visit", "holders", "memory_state", "phase", "record"]

_MODULE_OF = {
    "Holder": "_holders",
    "Ledger": "_ledger",
    "MemoryState": "_state",
    "Visit": "_phase",
    "holders": "_holders",
    "memory_state": "_state",
    "phase": "_phase",
    "record": "_record",
}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
