"""The classes of what the functions return, for annotations; there is no need to make one."""

from residency._checkpoint import Save, Snapshot
from residency._frozen import FrozenStream
from residency._handoff import Reclaimed, TakenOver
from residency._memory import Holder, MemoryState

__all__ = [
    "FrozenStream",
    "Holder",
    "MemoryState",
    "Reclaimed",
    "Save",
    "Snapshot",
    "TakenOver",
]
