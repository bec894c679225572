"""How many bytes of state may be on the device between two steps: numbers in, numbers out.

A *trigger* is a place that a training loop passes in each cycle: a module begins its forward pass,
a gradient has arrived, a step begins, a step is over. A cycle ends with a step. At a trigger the
allocator is read once, and

    room = cap - level - climb

``level`` is what is allocated without the state that is here. ``climb`` is how much higher the run
has ever gone from this trigger: until the next one in a forward pass, where state leaves, and until
the step in a backward pass, where it stays until then. ``cap`` is the most that the run had by
itself in the cycles of the climbs: both grow together, so that a cap that counts a larger batch
already cannot stand beside the climbs of a smaller one. If a batch makes a pass ``r`` times as
large, the peak grows by ``(r - 1) * (peak - base)``, and the unknown part of a climb by
``(r - 1) * climb``, which is less.

Invariant, which ``tests/optim/test_schedule.py`` tries to break: the bytes that a run has by itself
until the next trigger (or the step) and the room that was given are together at most the most that
its passes have had up to the end of that cycle, and the slots of its step.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

_CYCLES = 2  # that are measured; afterwards, those that follow one which went higher than these


class TriggerKind(IntEnum):
    """The kind of a trigger."""

    FORWARD = 0
    BACKWARD = 1
    STEP = 2
    OTHER = 3  # such as an evaluation, whose level does not tell how far it will go


class Trigger(NamedTuple):
    """A place in a cycle: the number of a module, or of a parameter."""

    kind: TriggerKind
    number: int


STEP_BEGINS = Trigger(TriggerKind.STEP, 0)
STEP_IS_OVER = Trigger(TriggerKind.STEP, 1)


class _Passed(NamedTuple):
    trigger: Trigger
    level: int
    peak: int


class RoomSchedule:
    """The rooms of one training loop, learned from its own cycles.

    Attributes:
        num_forward: How many triggers of forward passes the cycle before had.
        peak: The most that the run had by itself in the cycles that were learned from.
        is_measuring: Whether the peaks between triggers are wanted, for a cycle from its beginning.
    """

    def __init__(self) -> None:
        self.num_forward = 0
        self.peak = 0
        self._climbs: dict[Trigger, int] = {}
        self._highest: dict[Trigger, int] = {}
        self._passed: list[_Passed] = []
        self._num_cycles = 0
        self._goes_higher = False
        self.is_measuring = True

    @property
    def is_learned(self) -> bool:
        """Whether forward passes have been seen between two steps."""
        return self._num_cycles >= _CYCLES and self.num_forward > 0

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
        self._goes_higher |= level > self._highest.get(trigger, -1)
        if trigger == STEP_BEGINS:
            self._learn()
        climb = self._climbs.get(trigger)
        if climb is None or trigger.kind == TriggerKind.OTHER or not self.is_learned:
            return 0
        return max(self.peak - level - climb, 0)

    def _learn(self) -> None:
        """Turns a cycle into climbs, if it was measured whole; its last trigger, the step that
        begins, opens the next.
        """
        highest = 0
        peaks = [each.peak for each in self._passed]
        for index in reversed(range(len(self._passed) - 1)) if self.is_measuring else ():
            trigger, level, peak = self._passed[index]
            following = self._passed[index + 1].trigger.kind
            if trigger.kind != TriggerKind.BACKWARD or following not in (
                TriggerKind.BACKWARD,
                TriggerKind.STEP,
            ):
                highest = 0
            highest = max(highest, peak)
            self._climbs[trigger] = max(self._climbs.get(trigger, 0), highest - level)
            self._highest[trigger] = max(self._highest.get(trigger, 0), level)
            self.peak = max(self.peak, *peaks)
        self.num_forward = sum(each.trigger.kind == TriggerKind.FORWARD for each in self._passed)
        self._num_cycles += 1
        self.is_measuring = self._num_cycles < _CYCLES or self._goes_higher
        self._passed = self._passed[-1:]
        self._goes_higher = False
