"""A state at the moment of the call: its objects, its bytes, and their copies on the host.

Read ``_walk`` first (what a state is), then ``_blocks`` (which bytes it has) and ``_capture`` (how
they are taken beside training). ``_snapshot`` keeps one in the host's memory.
"""

from residency._checkpoint._capture._capture import (
    Capture as Capture,
    Held as Held,
    capture_described as capture_described,
)
from residency._checkpoint._capture._own_pairs import (
    has_own_pair as has_own_pair,
    own_state as own_state,
)
from residency._checkpoint._capture._snapshot import Snapshot as Snapshot, tree_of as tree_of
from residency._checkpoint._capture._walk import (
    Description as Description,
    describe as describe,
    parameter_names as parameter_names,
)
from residency._checkpoint._capture._wrappers import (
    plain_module as plain_module,
    plain_optimizer as plain_optimizer,
)
