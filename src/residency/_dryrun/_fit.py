"""Looks for the cheapest settings with which a script fits."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from residency._dryrun._answer import Answer
from residency._dryrun._offers import Found, Offer, Phase, offers, state_bytes
from residency._dryrun._settings import RunSettings
from residency._units import MIB

Run = Callable[[RunSettings], Answer]
_MOST_RUNS = 4  # to find how much of an optimizer's state may stay on the device
_SHARE = 64  # of that state: a part that is not looked for


@dataclass(frozen=True, slots=True)
class TriedChange:
    """A set of changes that a run was made with.

    Attributes:
        name: What they are.
        lines: What to write into the script, or into its command.
        cost: What they cost.
        answer: The run's answer.
    """

    name: str
    lines: tuple[str, ...]
    cost: str
    answer: Answer


def settings_that_fit(settings: RunSettings, answer: Answer, run: Run) -> Iterator[TriedChange]:
    """Tries what makes room, the cheapest set first, until one fits.

    A change is worth more than all that are cheaper together. Only those are tried that can help
    in a phase that has too little room, and only sets that can be enough by the books of a run.

    Args:
        settings: Those of the run that did not fit.
        answer: Its answer.
        run: Makes a run.

    Yields:
        Each set with its answer; the last one fits, or none does.
    """
    known = offers(answer.found)
    room = answer.capacity - answer.context
    # A set is a number with a bit for each offer, the cheapest one the lowest; beside it are the
    # part of it that a run was made with last, and what that run found.
    queue: list[tuple[int, int, Found]] = [(0, 0, answer.found)]
    queued = {0}
    failing: list[int] = []
    while queue:
        number, part, found = heapq.heappop(queue)
        if any(number & each == each for each in failing):
            continue
        chosen, added = _members(known, number), _members(known, number & ~part)
        if chosen and _may_suffice(added, found["phases"], room):
            tried = _try(chosen, settings, run)
            if tried.answer.is_good:
                yield _with_resident(chosen, settings, tried, answer.found, run)
                return
            yield tried
            if tried.answer.fits:  # the script fails with it, for a reason of its own
                failing.append(number)
                continue
            part, found = number, tried.answer.found
        tight = _tight(found["phases"], room)
        for index, offer in enumerate(known):
            further = number | 1 << index
            is_new = further not in queued and all(offer.group != each.group for each in chosen)
            if is_new and any(offer.helps(phase, room) for phase in tight):
                queued.add(further)
                heapq.heappush(queue, (further, part, found))


def _members(known: Sequence[Offer], number: int) -> list[Offer]:
    return [offer for index, offer in enumerate(known) if number >> index & 1]


def _tight(phases: Sequence[Phase], room: int) -> list[Phase]:
    """Returns the phases that need more than there is; else those with free bytes in pieces."""
    tight = [phase for phase in phases if phase["peak_allocated"] > room]
    return tight or [phase for phase in phases if phase["peak_reserved"] > room]


def _may_suffice(added: Sequence[Offer], phases: Sequence[Phase], room: int) -> bool:
    return all(
        phase["peak_allocated"] - sum(offer.gain(phase) for offer in added) <= room
        for phase in phases
    )


def _try(
    chosen: Sequence[Offer], settings: RunSettings, run: Run, *, resident: int | None = None
) -> TriedChange:
    for offer in chosen:
        settings = offer.change(settings)
    if resident is not None:
        settings = replace(settings, offload=resident)
    answer = run(settings)
    return TriedChange(
        " and ".join(offer.name for offer in chosen),
        tuple(line for offer in chosen for line in offer.lines(settings, answer.found)),
        ", ".join(offer.cost(settings, answer.found) for offer in chosen),
        answer,
    )


def _with_resident(
    chosen: Sequence[Offer], settings: RunSettings, best: TriedChange, found: Found, run: Run
) -> TriedChange:
    """Leaves as much of the optimizer's state on the device as fits, to a small part of it.

    The need is nearly a straight line over what is left, so that few runs find it.

    Args:
        chosen: A set that fits with all of the state on the host.
        settings: Those of the run without the set.
        best: What came of it.
        found: What the run without it found.
        run: Makes a run.
    """
    if all(offer.group != "offload" for offer in chosen):
        return best
    low, high = 0, state_bytes(found)  # it is known to fit with the one, and not with the other
    need = best.answer.needed + high  # with the latter
    for _ in range(_MOST_RUNS):
        spare = best.answer.capacity - best.answer.needed
        step = max(MIB, (high - low) // 8)
        wanted = low + spare * (high - low) // max(1, need - best.answer.needed)
        resident = min(wanted, high - step) // MIB * MIB
        if resident - low < max(MIB, state_bytes(found) // _SHARE):
            break
        tried = _try(chosen, settings, run, resident=resident)
        if tried.answer.is_good:
            low, best = resident, tried
        else:
            high, need = resident, max(tried.answer.needed, best.answer.capacity + MIB)
    return best
