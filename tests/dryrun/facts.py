"""What a training process finds of a training that fits, or as changed, where a verdict asks."""

from typing import Any

SEEN = {"steps": 2, "backward_passes": 2, "forward_passes": 2, "begun_passes": 2, "saves": 0}


def facts(**changed: Any) -> dict[str, Any]:
    """Makes what a run finds in which nothing went wrong, but for what is changed."""
    found: dict[str, Any] = {
        "ended": "finished",
        "error": None,
        "has_optimizer": True,
        "is_cut": False,
        "left_out": {"loops": [], "evaluations": 0},
        "out_of_memory": [],
        "peak_reserved": 1,
        "phase_of_error": "",
        "seen": dict(SEEN),
        "signals": [],
        "since_error": None,
        "was_interrupted": False,
    }
    return found | changed
