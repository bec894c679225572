"""Slabs, lanes and the gate: the only code that copies between the memories of host and device.

What moves as a whole into a new tensor, torch's ``Tensor.to`` moves.
``tests/test_knowledge_once.py`` lists where.
"""

from residency._transfer._buckets import (
    ELEMENT_WISE as ELEMENT_WISE,
    LARGEST_BUCKET_BYTES as LARGEST_BUCKET_BYTES,
    default_bucket as default_bucket,
    fitting_bucket as fitting_bucket,
)
from residency._transfer._events import (
    seconds_between as seconds_between,
    wait_asleep as wait_asleep,
)
from residency._transfer._gate import (
    Gate as Gate,
    Read as Read,
    gate_of as gate_of,
)
from residency._transfer._host_memory import (
    available_host_bytes as available_host_bytes,
    locked_limit as locked_limit,
)
from residency._transfer._host_ring import (
    Carried as Carried,
    HostRing as HostRing,
    host_bytes as host_bytes,
)
from residency._transfer._lanes import (
    CopyRun as CopyRun,
    Lanes as Lanes,
    copy_on as copy_on,
    copy_out as copy_out,
    joined_runs as joined_runs,
    lanes_of as lanes_of,
    on_default_stream as on_default_stream,
    on_lane as on_lane,
    raw_bytes as raw_bytes,
)
from residency._transfer._lending import lending as lending
from residency._transfer._mover import Flight as Flight, Move as Move, Mover as Mover
from residency._transfer._moves import copy_across as copy_across, moved_at_once as moved_at_once
from residency._transfer._owner import (
    Incoming as Incoming,
    Lent as Lent,
    Loans as Loans,
    Reception as Reception,
    bring_all_home as bring_all_home,
    defining_class as defining_class,
    note_owned as note_owned,
    note_visitor as note_visitor,
    owned_optimizers as owned_optimizers,
    owner_of as owner_of,
    refuse_hidden_state as refuse_hidden_state,
    register_forecast as register_forecast,
    register_owner as register_owner,
    states_to_come as states_to_come,
)
from residency._transfer._rates import link_rates as link_rates
from residency._transfer._slab import (
    ALIGNMENT as ALIGNMENT,
    Region as Region,
    Slab as Slab,
    SlabArena as SlabArena,
    align_up as align_up,
    another_over as another_over,
    is_only_one as is_only_one,
    memory_of as memory_of,
    views_in as views_in,
)
from residency._transfer._waiting import (
    Waiting as Waiting,
    can_wait as can_wait,
    is_any_away as is_any_away,
    is_away as is_away,
    is_looked_at as is_looked_at,
    let_wait as let_wait,
    register_away as register_away,
    replaced as replaced,
    state_stays as state_stays,
    tensors_in as tensors_in,
    waiting_of as waiting_of,
)
from residency._transfer._writers import (
    before_write as before_write,
    mutating as mutating,
    watch_optimizers as watch_optimizers,
    written_by_steps as written_by_steps,
)
