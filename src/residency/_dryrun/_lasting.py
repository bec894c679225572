"""For how many steps a training fits whose memory grows: what an answer says of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from residency._units import format_bytes


def steps_that_fit(found: Mapping[str, Any], headroom: int) -> int | None:
    """Returns after about how many steps the device is full; None where no number is known to be.

    Of a training that came to its end the growth did no harm, however large it is.

    Args:
        found: What the training process found.
        headroom: Bytes that the device still had at the peak.
    """
    growth = found["growth"]
    if not growth or not found["is_cut"] or headroom < 0:
        return None
    return int(growth["steps"] + headroom // growth["reserved_bytes_per_step"])


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
