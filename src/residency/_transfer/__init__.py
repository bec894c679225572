"""The only code that copies bytes between host and device: slabs, lanes and the gate."""

from residency._transfer._gate import Gate, copy_to_host, gate_of
from residency._transfer._host_memory import available_host_bytes
from residency._transfer._lanes import Lanes, Run, lanes_of, reset_lanes
from residency._transfer._slab import (
    ALIGNMENT,
    Region,
    Slab,
    SlabArena,
    align_up,
)

__all__ = [
    "ALIGNMENT",
    "Gate",
    "Lanes",
    "Region",
    "Run",
    "Slab",
    "SlabArena",
    "align_up",
    "available_host_bytes",
    "copy_to_host",
    "gate_of",
    "lanes_of",
    "reset_lanes",
]
