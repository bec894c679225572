"""A state at the moment of the call: its objects, its bytes, and their copies on the host.

Read ``_walk`` first (what a state is), then ``_blocks`` (which bytes it has) and ``_capture`` (how
they are taken beside training). ``_snapshot`` keeps one in the host's memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency._lazy import door

if TYPE_CHECKING:
    from residency._checkpoint._capture._capture import Capture, Held, capture_described
    from residency._checkpoint._capture._own_pairs import has_own_pair, own_state
    from residency._checkpoint._capture._snapshot import Snapshot, tree_of
    from residency._checkpoint._capture._walk import Description, describe, parameter_names
    from residency._checkpoint._capture._wrappers import plain_module, plain_optimizer

__all__ = [
    "Capture",
    "Description",
    "Held",
    "Snapshot",
    "capture_described",
    "describe",
    "has_own_pair",
    "own_state",
    "parameter_names",
    "plain_module",
    "plain_optimizer",
    "tree_of",
]

__getattr__ = door(
    __name__,
    {
        "_capture": ["Capture", "Held", "capture_described"],
        "_own_pairs": ["has_own_pair", "own_state"],
        "_snapshot": ["Snapshot", "tree_of"],
        "_walk": ["Description", "describe", "parameter_names"],
        "_wrappers": ["plain_module", "plain_optimizer"],
    },
)
