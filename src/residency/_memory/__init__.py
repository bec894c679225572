"""What the device's memory is used for: states, phases, the record of a run, and its growth.

Nothing is imported before it is asked for: reports read recordings without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency._lazy import door

if TYPE_CHECKING:
    from residency._memory._cycles import bytes_in_cycles
    from residency._memory._format import (
        FORMAT,
        LONGEST_LINE,
        PATH_VARIABLE,
        PEAKS,
        PEAKS_VARIABLE,
        VERSION,
        may_be_replaced,
        records_of,
    )
    from residency._memory._groups import HolderGroup, grouped
    from residency._memory._growth import Growth, find_growth, growing_classes
    from residency._memory._holders._holders import (
        Holder,
        addresses_of,
        find_holders,
        holders,
    )
    from residency._memory._imports import ImportWatch
    from residency._memory._kept_errors import errors_kept, let_go_of_errors
    from residency._memory._known_calls import KnownCalls
    from residency._memory._ledger import Ledger
    from residency._memory._messages import asked_bytes
    from residency._memory._objects import is_a, slot, type_name
    from residency._memory._phase import (
        Visit,
        begin_phase,
        boundaries,
        end_failed,
        end_phase,
        open_phases,
        phase,
    )
    from residency._memory._post_mortem import describe_device, explain, remedy_for
    from residency._memory._record import record, record_process
    from residency._memory._remedies import let_go_text
    from residency._memory._segments import segment_bytes
    from residency._memory._state import MemoryState, has_growing_segments, measure, memory_state

__all__ = [
    "FORMAT",
    "Growth",
    "Holder",
    "HolderGroup",
    "ImportWatch",
    "KnownCalls",
    "LONGEST_LINE",
    "Ledger",
    "MemoryState",
    "PATH_VARIABLE",
    "PEAKS",
    "PEAKS_VARIABLE",
    "VERSION",
    "Visit",
    "addresses_of",
    "asked_bytes",
    "begin_phase",
    "boundaries",
    "bytes_in_cycles",
    "describe_device",
    "end_failed",
    "end_phase",
    "errors_kept",
    "explain",
    "find_growth",
    "find_holders",
    "grouped",
    "growing_classes",
    "has_growing_segments",
    "holders",
    "is_a",
    "let_go_of_errors",
    "let_go_text",
    "may_be_replaced",
    "measure",
    "memory_state",
    "open_phases",
    "phase",
    "record",
    "record_process",
    "records_of",
    "remedy_for",
    "segment_bytes",
    "slot",
    "type_name",
]

__getattr__ = door(
    __name__,
    {
        "_cycles": ["bytes_in_cycles"],
        "_format": [
            "FORMAT",
            "LONGEST_LINE",
            "PATH_VARIABLE",
            "PEAKS",
            "PEAKS_VARIABLE",
            "VERSION",
            "may_be_replaced",
            "records_of",
        ],
        "_groups": ["HolderGroup", "grouped"],
        "_growth": ["Growth", "find_growth", "growing_classes"],
        "_holders._holders": ["Holder", "addresses_of", "find_holders", "holders"],
        "_imports": ["ImportWatch"],
        "_kept_errors": ["errors_kept", "let_go_of_errors"],
        "_known_calls": ["KnownCalls"],
        "_ledger": ["Ledger"],
        "_messages": ["asked_bytes"],
        "_objects": ["is_a", "slot", "type_name"],
        "_phase": [
            "Visit",
            "begin_phase",
            "boundaries",
            "end_failed",
            "end_phase",
            "open_phases",
            "phase",
        ],
        "_post_mortem": ["describe_device", "explain", "remedy_for"],
        "_record": ["record", "record_process"],
        "_remedies": ["let_go_text"],
        "_segments": ["segment_bytes"],
        "_state": ["MemoryState", "has_growing_segments", "measure", "memory_state"],
    },
)
