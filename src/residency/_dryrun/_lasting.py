"""For how many steps a training fits whose memory grows: what an answer says of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from residency._units import format_bytes


def steps_that_fit(found: Mapping[str, Any], headroom: int) -> int | None:
    """Returns after about how many steps the device is full; None where no number is known to be.

    Of a training that came to its end the growth did no harm, however large it is; nor will it
    where the loops have no more rounds.

    Args:
        found: What the training process found.
        headroom: Bytes that the device still had at the peak.
    """
    growth = found["growth"]
    if not growth or not found["is_cut"] or headroom < 0:
        return None
    steps = int(growth["steps"] + headroom // growth["reserved_bytes_per_step"])
    rounds = _rounds_of_loops(found["left_out"]["loops"])
    return steps if rounds is None or steps < rounds else None


def _rounds_of_loops(loops: Sequence[Mapping[str, Any]]) -> int | None:
    """Returns how many rounds loops have in all; None where that is not known."""
    if not loops or any(each["left"] is None for each in loops):
        return None
    return int(math.prod(each["rounds"] + each["left"] for each in loops))


def growth_line(found: Mapping[str, Any]) -> str | None:
    """Returns what grows, by how much a step, and what to do; None where nothing does."""
    growth = found["growth"]
    if not growth:
        return None
    names = ", ".join(growth["names"])
    where = f", in {names}" * bool(names)
    advice = f": {growth['advice']}" * bool(growth["advice"])
    size = format_bytes(growth["bytes_per_step"])
    return f"held memory grows by {size} a step{where}{advice}"
