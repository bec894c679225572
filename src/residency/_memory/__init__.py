"""What the device's memory is used for: states, phases, the record of a run, and its growth.

Nothing is imported before it is asked for: reports read recordings without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency._lazy import door

if TYPE_CHECKING:
    from residency._memory._cycles import bytes_in_cycles as bytes_in_cycles
    from residency._memory._format import (
        FORMAT as FORMAT,
        LONGEST_LINE as LONGEST_LINE,
        PATH_VARIABLE as PATH_VARIABLE,
        PEAKS as PEAKS,
        PEAKS_VARIABLE as PEAKS_VARIABLE,
        VERSION as VERSION,
        may_be_replaced as may_be_replaced,
        records_of as records_of,
    )
    from residency._memory._groups import grouped as grouped
    from residency._memory._growth import (
        Growth as Growth,
        find_growth as find_growth,
        growing_classes as growing_classes,
    )
    from residency._memory._holders._holders import (
        Holder as Holder,
        addresses_of as addresses_of,
        find_holders as find_holders,
        holders as holders,
    )
    from residency._memory._imports import ImportWatch as ImportWatch
    from residency._memory._kept_errors import (
        errors_kept as errors_kept,
        let_go_of as let_go_of,
        let_go_of_errors as let_go_of_errors,
    )
    from residency._memory._known_calls import (
        OPTIMIZER_STEP as OPTIMIZER_STEP,
        KnownCalls as KnownCalls,
    )
    from residency._memory._messages import asked_bytes as asked_bytes
    from residency._memory._objects import is_a as is_a, slot as slot
    from residency._memory._phase import (
        Visit as Visit,
        begin_phase as begin_phase,
        boundaries as boundaries,
        end_failed as end_failed,
        end_phase as end_phase,
        open_phases as open_phases,
        phase as phase,
    )
    from residency._memory._post_mortem import (
        describe_device as describe_device,
        explain as explain,
        remedy_for as remedy_for,
    )
    from residency._memory._record import record as record, record_process as record_process
    from residency._memory._remedies import let_go_text as let_go_text
    from residency._memory._segments import (
        SMALL_BLOCK_BYTES as SMALL_BLOCK_BYTES,
        SMALL_SEGMENT_BYTES as SMALL_SEGMENT_BYTES,
        segment_bytes as segment_bytes,
    )
    from residency._memory._state import (
        MemoryState as MemoryState,
        has_growing_segments as has_growing_segments,
        measure as measure,
        memory_state as memory_state,
    )

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
        "_groups": ["grouped"],
        "_growth": ["Growth", "find_growth", "growing_classes"],
        "_holders._holders": ["Holder", "addresses_of", "find_holders", "holders"],
        "_imports": ["ImportWatch"],
        "_kept_errors": ["errors_kept", "let_go_of", "let_go_of_errors"],
        "_known_calls": ["OPTIMIZER_STEP", "KnownCalls"],
        "_messages": ["asked_bytes"],
        "_objects": ["is_a", "slot"],
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
        "_segments": ["SMALL_BLOCK_BYTES", "SMALL_SEGMENT_BYTES", "segment_bytes"],
        "_state": ["MemoryState", "has_growing_segments", "measure", "memory_state"],
    },
)
