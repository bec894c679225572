"""Looks for the cheapest settings with which a script fits."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from residency._dryrun._answer import Answer
from residency._dryrun._lines import Found, lines_of
from residency._dryrun._offers import Offer, Phase, offers, state_bytes
from residency._dryrun._settings import RunSettings
from residency._dryrun._verdict import Verdict
from residency._units import MIB

Run = Callable[[RunSettings, str], Answer]
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
        suits: Whether the script goes on with them where it does without: else the run's error
            came of the changes.
    """

    name: str
    lines: tuple[str, ...]
    cost: str
    answer: Answer
    suits: bool


def settings_that_fit(
    settings: RunSettings, answer: Answer, run: Run, words: Sequence[str] = (), *, left: int = 0
) -> Iterator[TriedChange]:
    """Tries what makes room, until the cheapest set that fits is known.

    A change is worth more than all that are cheaper together. Each set is run once, and only where
    the runs so far leave open whether it fits; `_Search` says how few these are.

    Args:
        settings: Those of the run that did not fit.
        answer: Its answer.
        run: Makes a run, given what it tries.
        words: The command.
        left: Bytes of the device that are to be left free; no peak of an answer counts them.

    Yields:
        Each set that does not fit, with its answer, and the cheapest one that does at the end, if
        there is one.
    """
    settings = replace(settings, others=settings.others + left)
    with_room = replace(answer, context=answer.context + left)
    for tried in _tried(settings, with_room, run, words):
        peak = replace(tried.answer, context=tried.answer.context - left)
        yield replace(tried, answer=peak)


def _tried(
    settings: RunSettings, answer: Answer, run: Run, words: Sequence[str]
) -> Iterator[TriedChange]:
    search = _Search(offers(answer.found, words), answer)
    best: tuple[list[Offer], TriedChange] | None = None
    while number := search.next():
        chosen = search.members(number)
        tried = _try(chosen, settings, answer.found, run)
        search.note(number, tried.answer)
        if tried.answer.fits:
            best = chosen, tried
        else:
            yield tried
        if _was_interrupted(tried):
            yield from [] if best is None else [best[1]]
            return
    if best is not None:
        yield _with_resident(best[0], settings, best[1], answer.found, run)


class _Search:
    """The sets of changes, what runs have shown of them, and which is to be run next.

    A set is a number with a bit for each offer, the cheapest one the lowest, so that the cheaper of
    two sets is the lower number. What a run says of other sets follows from bounds alone: with a
    further offer no phase loses more than its `gain`, without one no more than what it `added`, and
    of a group a later one does more than those before it.

    The bounds leave few sets open where runs are made in this order: after the cheapest set that
    may fit the one with all that can help; where that fits, one without each of its offers, the
    dearest first, beside all that are cheaper, and, where that offer has to stay, one without all
    that are cheaper; then what is still open, since an offer of the others may take more than it
    gives, the set with most offers first.
    """

    def __init__(self, known: Sequence[Offer], answer: Answer) -> None:
        """Knows of the run without changes alone.

        Args:
            known: The offers, the cheapest first.
            answer: The answer of that run.
        """
        self._fitting = 0  # what fits, with all that is cheaper than its dearest offers
        self._pool = 0  # the offers that it can be made of
        self._is_over = False
        self._known = known
        self._room = answer.capacity - answer.context
        self._too_large: dict[int, Found] = {0: answer.found}  # by the set, what the run found
        self._failed: list[int] = []  # the sets with which the script ends in an error
        self._working = 0  # the offers with which it does not
        sets = [0]
        for index, offer in enumerate(known):
            sets += [
                number | 1 << index
                for number in sets
                if all(offer.group != each.group for each in self.members(number))
            ]
        self._sets = sorted(sets)[1:]
        self._joining = sum(1 << index for index, each in enumerate(known) if each.joins_pieces)

    def members(self, number: int) -> list[Offer]:
        """Returns the offers of a set."""
        return [offer for index, offer in enumerate(self._known) if number >> index & 1]

    def next(self) -> int:
        """Returns the set to run next; 0 when all is known."""
        if self._is_over:
            return 0
        if half := self._half():
            return half
        with_less = next(filter(self._is_open, self._cheaper(self._fitting)), 0)
        if with_less:
            return with_less
        left = [each for each in self._sets if self._is_open(each) and self._helps(each)]
        if not left:
            return 0
        return left[0] if len(self._too_large) == 1 else self._most(left)

    def _most(self, left: Sequence[int]) -> int:
        """Returns all that sets are made of, or as much of it as may fit."""
        # Whether free bytes lie in pieces shows only where there is room for the tensors.
        self._pool = functools.reduce(operator.or_, left, self._joining)
        most = max(left, key=lambda each: (each.bit_count(), each))
        tried = (self._strongest(self._pool), self._strongest(most | self._joining), most)
        return next(filter(self._is_open, tried))

    def note(self, number: int, answer: Answer) -> None:
        """Notes what a run with a set has shown."""
        if not answer.fits and not answer.is_too_large:
            self._failed.append(number)
            return
        self._working |= number
        if not answer.fits:
            self._too_large[number] = answer.found
        else:
            self._is_over = len(self._too_large) == 1  # it was the cheapest that may fit
            self._fitting = number

    def _cheaper(self, number: int) -> Iterator[int]:
        """Yields a set without each of its offers, or with a lesser one, and all cheaper offers;
        then with it and no cheaper one.

        The dearest offer comes first. Of lesser ones in its place the cheapest does.
        """
        for index in reversed(range(number.bit_length())):
            if not number >> index & 1:
                continue
            above = number >> index + 1 << index + 1
            first = index
            while first and self._known[first - 1].group == self._known[index].group:
                first -= 1
            below = self._pool & (1 << first) - 1
            for instead in (0, *(1 << lesser for lesser in range(first, index))):
                yield self._strongest(above | instead & self._pool | below)
            yield above | 1 << index

    def _strongest(self, number: int) -> int:
        """Returns the offers of which each does most in its group."""
        strongest = {
            offer.group: 1 << index
            for index, offer in enumerate(self._known)
            if number >> index & 1
        }
        return sum(strongest.values())

    def _covers(self, number: int, other: int) -> bool:
        """Returns whether a set does all that another one does."""
        does = {
            offer.group: index for index, offer in enumerate(self._known) if number >> index & 1
        }
        return all(
            does.get(offer.group, -1) >= index
            for index, offer in enumerate(self._known)
            if other >> index & 1
        )

    def _is_open(self, number: int) -> bool:
        """Returns whether a set may fit, of those that are cheaper than what is known to."""
        if not number or self._breaks(number):
            return False
        if self._fitting and number >= self._fitting:
            return False
        return all(
            self._may_fit(number, other, found["phases"])
            for other, found in self._too_large.items()
        )

    def _breaks(self, number: int) -> bool:
        """Returns whether a set has all of what can have broken another one."""
        return any(number & each == each for each in map(self._suspects, self._failed))

    def _suspects(self, failed: int) -> int:
        """Returns the offers of a set that can have broken it: all if each works elsewhere."""
        return failed & ~self._working or failed

    def _half(self) -> int:
        """Returns what is to be run next to find which of several offers has broken a set: those of
        it that work, with the cheaper half of the others; 0 where that is known.
        """
        for failed in self._failed:
            suspects = [1 << index for index in range(failed.bit_length())]
            suspects = [each for each in suspects if each & self._suspects(failed)]
            half = failed & self._working | sum(suspects[: len(suspects) // 2])
            if len(suspects) > 1 and failed & ~self._working and not self._is_known(half):
                return half
        return 0

    def _is_known(self, number: int) -> bool:
        return number in self._too_large or number == self._fitting or self._breaks(number)

    def _may_fit(self, number: int, other: int, phases: Sequence[Phase]) -> bool:
        """Returns whether a set may fit where another one needed too much in some phases."""
        if number == other:
            return False
        if self._covers(other, number):
            groups = {offer.group for offer in self.members(number)}
            without = [each for each in self.members(other) if each.group not in groups]
            return _may_do_without(without, phases, self._room)
        if self._covers(number, other):
            return _may_suffice(self.members(number & ~other), phases, self._room)
        return True

    def _helps(self, number: int) -> bool:
        """Returns whether each offer can do something where a run without it had too little."""

        def helps(index: int, offer: Offer) -> bool:
            rest = number & ~(1 << index)
            return any(
                offer.helps(phase, self._room)
                for other, found in self._too_large.items()
                if self._covers(rest, other)
                for phase in _tight(found["phases"], self._room)
            )

        return all(
            helps(index, offer) for index, offer in enumerate(self._known) if number >> index & 1
        )


def _was_interrupted(tried: TriedChange) -> bool:
    return tried.answer.verdict is Verdict.INTERRUPTED


def _tight(phases: Sequence[Phase], room: int) -> list[Phase]:
    """Returns the phases that need more than there is; else those with free bytes in pieces."""
    tight = [phase for phase in phases if phase["peak_allocated"] > room]
    return tight or [phase for phase in phases if phase["peak_reserved"] > room]


def _may_do_without(offers: Sequence[Offer], phases: Sequence[Phase], room: int) -> bool:
    """Returns whether a run that needed too much may fit without some of its offers."""

    def added(phase: Phase) -> int:
        return sum(offer.added(phase) for offer in offers)

    tight = _tight(phases, room)
    if any(phase["peak_allocated"] > room for phase in tight):
        return all(phase["peak_allocated"] - added(phase) <= room for phase in tight)
    # What is reserved stays so in the phases that follow.
    most = max((phase["peak_reserved"] for phase in tight), default=0)
    return bool(most - max(map(added, phases), default=0) <= room)


def _may_suffice(added: Sequence[Offer], phases: Sequence[Phase], room: int) -> bool:
    return all(
        phase["peak_allocated"] - sum(offer.gain(phase) for offer in added) <= room
        for phase in phases
    )


def _try(
    chosen: Sequence[Offer],
    settings: RunSettings,
    without: Found,
    run: Run,
    *,
    resident: int | None = None,
) -> TriedChange:
    for offer in chosen:
        settings = offer.change(settings)
    if resident is not None:
        settings = replace(settings, offload=resident)
    name = " and ".join(offer.name for offer in chosen)
    answer = run(settings, name)
    # A run that failed may not have come to what the lines are about.
    has_come = answer.fits or answer.is_too_large
    found = answer.found if has_come else without
    costs = ", ".join(offer.cost(settings, found) for offer in chosen)
    is_over = answer.verdict in (Verdict.INTERRUPTED, Verdict.KILLED)
    suits = has_come or is_over or answer.found["error"] == without["error"]
    return TriedChange(name, lines_of(settings, found), costs, answer, suits)


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
        tried = _try(chosen, settings, found, run, resident=resident)
        if _was_interrupted(tried):
            break
        if tried.answer.fits:
            low, best = resident, tried
        else:
            high, need = resident, max(tried.answer.needed, best.answer.capacity + MIB)
    return best
