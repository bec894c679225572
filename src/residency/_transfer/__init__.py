"""Slabs, lanes and the gate: the only code that copies between the memories of host and device.

What moves as a whole into a new tensor, torch's ``Tensor.to`` moves.
``tests/test_knowledge_once.py`` lists where.
"""

from residency._transfer._buckets import ELEMENT_WISE, fitting_bucket
from residency._transfer._events import wait_asleep
from residency._transfer._gate import Gate, Read, copy_to_host, gate_of
from residency._transfer._host_memory import available_host_bytes
from residency._transfer._host_ring import Carried, HostRing, host_bytes
from residency._transfer._lanes import (
    CopyRun,
    Lanes,
    copy_on,
    copy_out,
    lanes_of,
    on_lane,
    raw_bytes,
    reset_lanes,
)
from residency._transfer._lending import Lending, lending
from residency._transfer._moves import copy_across, moved_at_once
from residency._transfer._owner import (
    Incoming,
    Lent,
    Loans,
    Reception,
    StateOwner,
    defining_class,
    note_owned,
    owned_optimizers,
    owner_of,
    register_forecast,
    register_owner,
    states_to_come,
)
from residency._transfer._slab import (
    ALIGNMENT,
    Region,
    Slab,
    SlabArena,
    align_up,
    another_over,
    is_only_one,
    memory_of,
)
from residency._transfer._waiting import (
    Waiting,
    can_wait,
    is_away,
    is_looked_at,
    let_wait,
    register_away,
    replaced,
    state_stays,
    tensors_in,
    waiting_of,
)
from residency._transfer._writers import (
    before_write,
    mutating,
    watch_optimizers,
    written_by_steps,
)

__all__ = [
    "ALIGNMENT",
    "Carried",
    "ELEMENT_WISE",
    "Gate",
    "HostRing",
    "Incoming",
    "Lanes",
    "Lending",
    "Lent",
    "Loans",
    "Read",
    "Reception",
    "Region",
    "CopyRun",
    "Slab",
    "SlabArena",
    "StateOwner",
    "Waiting",
    "align_up",
    "another_over",
    "available_host_bytes",
    "before_write",
    "can_wait",
    "copy_across",
    "copy_on",
    "copy_out",
    "copy_to_host",
    "defining_class",
    "fitting_bucket",
    "gate_of",
    "host_bytes",
    "is_away",
    "is_looked_at",
    "is_only_one",
    "let_wait",
    "lanes_of",
    "lending",
    "memory_of",
    "moved_at_once",
    "mutating",
    "note_owned",
    "on_lane",
    "owned_optimizers",
    "owner_of",
    "raw_bytes",
    "register_away",
    "register_forecast",
    "register_owner",
    "replaced",
    "reset_lanes",
    "state_stays",
    "states_to_come",
    "tensors_in",
    "waiting_of",
    "watch_optimizers",
    "wait_asleep",
    "written_by_steps",
]
