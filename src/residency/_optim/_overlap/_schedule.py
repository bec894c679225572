"""How many bytes of state may be on the device between two steps: numbers in, numbers out.

A *trigger* is a place that a training loop passes: a module begins its forward pass, a gradient has
arrived, a step begins, a step is over. A *cycle* goes from the beginning of one step to that of the
next, of whatever optimizer. At a trigger the allocator is read once, and

    room = cap - level - climb

``level`` is what is allocated without the state that is here, and ``cap`` the most that the run has
ever had by itself. ``climb`` is how much higher the run may go from this trigger: until the next
one in a forward pass, where state leaves, and until the step in a backward pass, where it stays
until then.

[Note: climbs] A *pass* goes from the first forward pass after a step, or after a gradient, to its
last gradient. If its batch is ``r`` times as large, what it has above its base grows ``r`` times,
and so does each climb. So the slope ``climb / (peak - base)`` of a trigger stays, and the largest
that was ever seen tells the climb in a pass that would go up to the cap. A pass that goes less high
climbs less; one that goes beyond the cap by some bytes climbs further by no more than these. What a
step allocates does not grow with a batch.

Invariant, which ``tests/optim/test_schedule.py`` tries to break: the bytes that a run has by itself
until the next trigger (or the step) and the room that was given are together at most the most that
it has had up to the end of that cycle, and the slots of its step.
"""

from __future__ import annotations

import sys
from enum import IntEnum
from typing import NamedTuple

_TRIES = 4  # a cycle that went higher is followed by shorter ones, as a rule


class TriggerKind(IntEnum):
    """The kind of a trigger."""

    FORWARD = 0
    BACKWARD = 1
    STEP_BEGINS = 2
    STEP_IS_OVER = 3
    OTHER = 4  # such as an evaluation, whose level does not tell how far it will go


class Trigger(NamedTuple):
    """A place in a cycle: the number of a parameter, or of an optimizer."""

    kind: TriggerKind
    number: int


class _Passed(NamedTuple):
    trigger: Trigger
    level: int
    peak: int


class _Slope(NamedTuple):
    """A climb, and how high its pass went above its base."""

    climb: int = 0
    height: int = 1


class RoomSchedule:
    """The rooms of one device, learned from the cycles of its run.

    Attributes:
        cap: The most that the run had by itself in the cycles that were learned from.
        is_measuring: Whether the peaks between triggers are wanted, for a cycle from its beginning.
    """

    def __init__(self) -> None:
        self.cap = 0
        self.is_measuring = True
        self._base = sys.maxsize  # the lowest of all passes
        self._slopes: dict[Trigger, _Slope] = {}
        self._of_steps: dict[Trigger, int] = {}  # climbs
        self._highest: dict[Trigger, int] = {}
        self._passed: list[_Passed] = []
        self._outdated: dict[int, int] = {}  # how many cycles to measure, up to whose steps

    def at(self, trigger: Trigger, level: int, peak: int) -> int:
        """Returns the room in bytes from a trigger on, at least 0.

        Args:
            trigger: The one that the loop passes.
            level: What is allocated without state of ours.
            peak: The most of that since the trigger before, where ``is_measuring``, else ``level``.
        """
        if self._passed:
            before = self._passed[-1]
            self._passed[-1] = before._replace(peak=max(before.peak, peak))
        self._passed.append(_Passed(trigger, level, level))
        if trigger.kind == TriggerKind.STEP_BEGINS:
            self._end_cycle(trigger.number)
        climb = self._climb(trigger)
        return 0 if climb is None else max(self.cap - level - climb, 0)

    def _climb(self, trigger: Trigger) -> int | None:
        """Returns a climb in a pass that goes up to the cap; None if nothing is known of it."""
        if trigger.kind == TriggerKind.STEP_BEGINS:
            return self._of_steps.get(trigger)
        slope = self._slopes.get(trigger)
        if slope is None or trigger.kind == TriggerKind.OTHER:
            return None
        return -(-slope.climb * (self.cap - self._base) // slope.height)

    def _end_cycle(self, optimizer: int) -> None:
        """Ends a cycle with the step that begins, which is the first trigger of the next."""
        begins = self._passed[0].trigger.kind == TriggerKind.STEP_BEGINS
        cycle, self._passed = self._passed[:-1], self._passed[-1:]
        if not cycle or not begins:
            return
        is_higher = any(level > self._highest.get(trigger, -1) for trigger, level, _ in cycle)
        if self.is_measuring:
            self._learn(cycle)
            num_left = 0 if is_higher else self._outdated.get(optimizer, 0) - 1
        else:
            num_left = _TRIES if is_higher else self._outdated.get(optimizer, 0)
        self._outdated[optimizer] = max(num_left, 0)
        self.is_measuring = any(self._outdated.values())

    def _learn(self, cycle: list[_Passed]) -> None:
        """Takes over what a cycle tells that was measured whole."""
        for trigger, level, peak in cycle:
            self.cap = max(self.cap, peak)
            self._highest[trigger] = max(self._highest.get(trigger, 0), level)
            if trigger.kind == TriggerKind.STEP_BEGINS:
                climb = peak - level
                self._of_steps[trigger] = max(self._of_steps.get(trigger, 0), climb)
        for each in _passes(cycle):
            base = min(passed.level for passed in each)
            height = max(passed.peak for passed in each) - base
            self._base = min(self._base, base)
            highest = 0
            following = TriggerKind.BACKWARD
            for trigger, level, peak in reversed(each):
                is_kept = trigger.kind == following == TriggerKind.BACKWARD
                highest = max(highest if is_kept else 0, peak)
                following = trigger.kind
                known = self._slopes.get(trigger, _Slope())
                if trigger not in self._slopes or (
                    (highest - level) * known.height > known.climb * height
                ):
                    self._slopes[trigger] = _Slope(highest - level, max(height, 1))


def _passes(cycle: list[_Passed]) -> list[list[_Passed]]:
    """Returns the passes of a cycle, without steps and evaluations."""
    passes: list[list[_Passed]] = [[]]
    before = TriggerKind.STEP_BEGINS
    for passed in cycle:
        kind = passed.trigger.kind
        if kind == TriggerKind.FORWARD and before == TriggerKind.BACKWARD:
            passes.append([])
        if kind not in (TriggerKind.STEP_BEGINS, TriggerKind.OTHER):
            passes[-1].append(passed)
        before = kind
    return [each for each in passes if each]
