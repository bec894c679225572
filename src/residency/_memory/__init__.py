"""What the device's memory is used for: states, phases, the record of a run, and its growth."""

from residency._memory._holders import Holder, holders
from residency._memory._state import MemoryState, memory_state

__all__ = ["Holder", "MemoryState", "holders", "memory_state"]
