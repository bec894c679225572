"""What a training process finds of a training that fits, or as changed, where a verdict asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from residency._dryrun import RunSettings
from residency._dryrun._answer import Answer

SEEN = {"steps": 2, "backward_passes": 2, "forward_passes": 2, "begun_passes": 2, "saves": 0}


def facts(**changed: Any) -> dict[str, Any]:
    """Makes what a run finds in which nothing went wrong, but for what is changed."""
    found: dict[str, Any] = {
        "caught": "",
        "ended": "finished",
        "error": None,
        "has_failed": False,
        "has_framework": True,
        "has_optimizer": True,
        "is_cut": False,
        "left_out": {"loops": [], "branches": [], "thaws": [], "evaluations": 0, "data": None},
        "growth": None,
        "growth_of_passes": None,
        "growth_of_trainings": None,
        "others": [],
        "out_of_memory": [],
        "peak_reserved": 1,
        "remedy": None,
        "phase_of_error": "",
        "seen": dict(SEEN),
        "signals": [],
        "tries_plans": False,
        "since_error": None,
        "unstepped": 0,
        "was_interrupted": False,
        "workspaces": None,
    }
    return found | changed


MIB = 1 << 20
FULL = {"phase": "forward", "step": 1, "line": "", "operation": "", "asked": 2, "free": 1}
KINDS = ("parameters", "gradients", "optimizer state", "activations", "other")
NOTHING = RunSettings(folder="", capacity=0)


def phase(name: str, *held: int, reserved: int | None = None) -> dict[str, Any]:
    """Makes a phase of MiB of each kind; what is reserved is what is allocated, or more."""
    at_peak = {kind: size * MIB for kind, size in zip(KINDS, held, strict=True)}
    allocated = sum(at_peak.values())
    return {
        "name": name,
        "visits": 1,
        "at_peak": at_peak,
        "peak_allocated": allocated,
        "peak_reserved": allocated if reserved is None else reserved * MIB,
    }


def answered(
    phases: Sequence[dict[str, Any]],
    capacity: int,
    *,
    error: str | None = None,
    context: int = 0,
    **found: Any,
) -> Answer:
    """Makes the answer of a run with such phases on a device of so many MiB."""
    over = any(each["peak_reserved"] > capacity * MIB - context for each in phases)
    known = facts() | {"libraries": [], "arguments": {}, "recomputed": [], **found}
    has_load = any(each["name"] == "load" for each in phases)
    known = {"trainer": {"numbers": {}}, "has_template": False, "has_buckets": False, **known}
    known |= {"loads_on_device": has_load, "loads_state": has_load}
    known |= {"phases": list(phases), "error": error, "ended": "error" if error else "finished"}
    first = {**known, "out_of_memory": [dict(FULL)] if over and not error else []}
    first["since_error"] = dict.fromkeys(SEEN, 0) if first["out_of_memory"] else None
    return Answer(known, first, capacity * MIB, context, "a device")
