"""Memory that grows: for how many steps a training fits, and the names of what grows."""

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
    size = format_bytes(growth["bytes_per_step"])
    return f"held memory grows by {size} a step{_where(growth)}"


def line_of_passes(found: Mapping[str, Any]) -> str | None:
    """Returns what grows in an evaluation, and what to do; None where nothing does."""
    growth = found["growth_of_passes"]
    if not growth:
        return None
    a_pass, passes = growth["bytes_per_pass"], growth["passes"]
    return (
        f"held memory grows by {format_bytes(a_pass)} with each forward pass without gradients, "
        f"by {format_bytes(a_pass * passes)} in {passes:,} of them{_where(growth)}"
    )


def line_of_trainings(found: Mapping[str, Any], headroom: int) -> str | None:
    """Returns the growth of the held memory from training to training, and how many trainings fit;
    None where it does not grow.
    """
    growth = found["growth_of_trainings"]
    if not growth:
        return None
    size, seen = growth["bytes_per_training"], growth["trainings"]
    more = max(headroom, 0) // size
    outer = found["left_out"]["loops"][:1]
    left = outer[0]["left"] if outer else 0
    fit = f" (about {seen + more:,} of them fit)" if left is None or left > more else ""
    return f"held memory grows by {format_bytes(size)} with each training{fit}{_where(growth)}"


def _where(growth: Mapping[str, Any]) -> str:
    names = ", ".join(growth["names"])
    return f", in {names}" * bool(names) + f": {growth['advice']}" * bool(growth["advice"])
