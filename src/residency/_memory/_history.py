"""What live tensors held at the ends of the visits of each phase, so that growth shows.

A few numbers a phase; they name no tensor, and keep none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from residency._memory._growth import find_growth

_MOST_PHASES = 256
_MOST_POINTS = 64  # of a phase; then every other one is left out, and of what follows, too
_FEWEST_VISITS = 4
_FEW_POINTS = 8  # of so few the differences have to be alike: batches of many lengths rise, too
_ALIKE = 1.25
_STEPS = ("step", "optimizer_step")  # of a Trainer with `ResidencyCallback`, and of any optimizer


@dataclass(frozen=True, slots=True)
class SteadyGrowth:
    """The growth of what is held, from visit to visit of a phase.

    Attributes:
        phase: Its name.
        bytes_per_visit: By how much.
        total_bytes: By how much since the visits began.
        num_visits: How many there were.
    """

    phase: str
    bytes_per_visit: int
    total_bytes: int
    num_visits: int

    @property
    def is_step(self) -> bool:
        """Whether the phase is a training step, or one of an optimizer."""
        return self.phase in _STEPS

    @property
    def when(self) -> str:
        """How the growth is said."""
        return "a step" if self.is_step else f"at each {self.phase!r}"


@dataclass(slots=True)
class _Series:
    stride: int = 1
    count: int = 0
    points: list[tuple[int, int]] = field(default_factory=list)

    def note(self, num_bytes: int) -> None:
        if self.count % self.stride == 0:
            self.points.append((self.count, num_bytes))
        self.count += 1
        if len(self.points) > _MOST_POINTS:
            self.points = self.points[::2]
            self.stride *= 2


class HeldHistory:
    """The bytes at the ends of visits, by the path of the phase."""

    def __init__(self) -> None:
        """Knows of none."""
        self._series: dict[str, _Series] = {}

    def note(self, path: str, num_bytes: int) -> None:
        """Takes in the end of a visit; further phases than 256 are passed over."""
        if path not in self._series and len(self._series) >= _MOST_PHASES:
            return
        self._series.setdefault(path, _Series()).note(num_bytes)

    def clear(self) -> None:
        """Forgets all."""
        self._series.clear()

    def num_visits(self, path: str) -> int:
        """Returns how many visits of a phase have ended."""
        return self._series[path].count if path in self._series else 0

    def steady(self) -> SteadyGrowth | None:
        """Returns how what is held grows, by the steps where these show it, else by the phase that
        was visited most; None where nothing grows.
        """
        found = [each for path in list(self._series) if (each := self._growth_of(path))]
        return max(found, key=lambda each: (each.is_step, each.num_visits), default=None)

    def _growth_of(self, path: str) -> SteadyGrowth | None:
        series = self._series[path]
        if series.count < _FEWEST_VISITS:
            return None
        numbers, values = zip(*series.points, strict=True)
        growth = find_growth("held", values, numbers)
        if growth is None or not growth.is_growing:
            return None
        if len(values) < _FEW_POINTS:
            rises = [after - before for before, after in pairwise(values[-_FEWEST_VISITS:])]
            if max(rises) > _ALIKE * max(0, min(rises)):
                return None
        # The first visit ends before there is a state of the optimizer's, or the like: what it and
        # the second one grew by is taken to be as much.
        later = values[1:]
        each = round(growth.bytes_per_visit)
        total = later[-1] - min(later) + 2 * each
        return SteadyGrowth(path.rpartition("/")[2], each, total, series.count)


held_history = HeldHistory()
