"""What the device's memory is used for: states, phases, the record of a run, and its growth."""

from residency._memory._ledger import Ledger
from residency._memory._phase import Visit, phase
from residency._memory._record import record
from residency._memory._state import MemoryState, memory_state

__all__ = ["Ledger", "MemoryState", "Visit", "memory_state", "phase", "record"]
