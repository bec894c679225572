"""Whether memory grows from visit to visit of the same boundary, and which class of it does.

The measure is Theil and Sen's: the median slope over all pairs of visits, which single outliers do
not move. The first visits, when caches fill and states are made, are left out.

Source: P. K. Sen, Estimates of the regression coefficient based on Kendall's tau, 1968.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from residency._units import MIB, format_bytes

_MIN_POINTS = 3
_MAX_POINTS = 256  # pairs grow with the square
_MIN_TOTAL_BYTES = 2 * MIB  # a segment of the small pool
_MIN_TOTAL_SHARE = 0.001
_RISING_SHARE = 0.75  # of the pairs; half of them rise in noise


@dataclass(frozen=True, slots=True)
class Growth:
    """The growth of one series of figures from visit to visit.

    Attributes:
        name: The class of memory.
        bytes_per_visit: The median slope.
        num_visits: How many visits it was found over, the warm-up left out.
        is_growing: Whether it rises steadily, and by more than a rounding.
    """

    name: str
    bytes_per_visit: float
    num_visits: int
    is_growing: bool

    def __str__(self) -> str:
        size = format_bytes(round(self.bytes_per_visit))
        sign = "+" if self.bytes_per_visit > 0 else ""
        return f"{self.name} {sign}{size} per visit over {self.num_visits} visits"


def find_growth(
    name: str, values: Sequence[float], visits: Sequence[float] | None = None
) -> Growth | None:
    """Returns how a series goes, or None where three visits after the warm-up are not there.

    Args:
        name: What the series is of.
        values: Bytes at the same boundary, visit by visit.
        visits: The numbers of the visits, ascending; by default every visit is there.
    """
    numbers = list(range(len(values))) if visits is None else list(visits)
    warm_up = max(0, min(len(values) // 2, len(values) - _MIN_POINTS))
    points = list(zip(numbers, values, strict=True))[warm_up:]
    if len(points) < _MIN_POINTS:
        return None
    num_visits = len(points)
    if num_visits > _MAX_POINTS:  # evenly, both ends kept
        last = num_visits - 1
        points = [points[round(i * last / (_MAX_POINTS - 1))] for i in range(_MAX_POINTS)]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2)]
    slope = median(slopes)
    total = slope * (points[-1][0] - points[0][0])
    level = median(value for _, value in points)
    is_steady = sum(s > 0 for s in slopes) >= _RISING_SHARE * len(slopes)
    is_much = total >= max(_MIN_TOTAL_BYTES, _MIN_TOTAL_SHARE * level)
    return Growth(name, slope, num_visits, is_steady and is_much)


def growing_classes(series: Mapping[str, Sequence[float]]) -> list[Growth]:
    """Returns the series that grow, the fastest first."""
    found = [find_growth(name, values) for name, values in series.items()]
    growing = [growth for growth in found if growth is not None and growth.is_growing]
    return sorted(growing, key=lambda growth: -growth.bytes_per_visit)
