"""What a run's phases come to: how often, the peak, the classes at the end, and what grows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from residency._memory import Growth, find_growth, growing_classes
from residency._report._read import Boundary, RecordedRun, RecordedVisit

# Free is the device's and falls as the others rise.
_GROWING = ("held", "returnable", "stuck", "draining", "pooled", "outside")


@dataclass(frozen=True, slots=True)
class Row:
    """One phase.

    Attributes:
        phase: Its path.
        rank: Whose.
        count: How many visits ended.
        num_failed: How many of them by an exception.
        peak: The highest peak of all visits.
        is_peak_exact: Whether that peak is exact and not an upper bound.
        last: The figures at the end of the last visit.
        seconds: The time of all visits.
        total: How all classes together go from visit to visit; None with too few visits.
        growing: The classes that grow, the fastest first.
    """

    phase: str
    rank: int
    count: int
    num_failed: int
    peak: int
    is_peak_exact: bool
    last: Boundary
    seconds: float
    total: Growth | None
    growing: tuple[Growth, ...]


def summarise(run: RecordedRun) -> list[Row]:
    """Returns the phases of a run in the order in which they first began."""
    visits: dict[str, list[tuple[RecordedVisit, Boundary]]] = {}
    for visit in run.visits:
        if visit.end is not None:
            visits.setdefault(visit.phase, []).append((visit, visit.end))
    return [_row(phase, run.rank, found) for phase, found in visits.items()]


def whole_run(runs: list[RecordedRun]) -> Row | None:
    """Returns a run as one row, of the rank that has the most; None if nothing ended in it.

    Its phase is that of the peak, or empty where the peak came after the last phase.
    """
    rows = []
    for run in runs:
        found = summarise(run)
        if not found:
            continue
        highest = max(found, key=lambda row: (row.peak, row.is_peak_exact))
        row = replace(merged(highest.phase, found), total=None, growing=())
        if run.last_peak > row.peak:  # the register rose since the last boundary
            row = replace(row, phase="", peak=run.last_peak, is_peak_exact=True)
        rows.append(row)
    return max(rows, key=lambda row: row.peak, default=None)


def merged(phase: str, rows: list[Row]) -> Row:
    """Returns one row for several phases of a rank, with the growth of each."""
    highest = max(row.peak for row in rows)
    latest = max(rows, key=lambda row: row.last.seconds)
    growing = (growth for row in rows for growth in row.growing)
    return Row(
        phase=phase,
        rank=latest.rank,
        count=sum(row.count for row in rows),
        num_failed=sum(row.num_failed for row in rows),
        peak=highest,
        is_peak_exact=any(row.is_peak_exact for row in rows if row.peak == highest),
        last=latest.last,
        seconds=sum(row.seconds for row in rows),
        total=next((row.total for row in rows if row.total is not None), None),
        growing=tuple(sorted(growing, key=lambda growth: -growth.bytes_per_visit)),
    )


def _row(phase: str, rank: int, found: list[tuple[RecordedVisit, Boundary]]) -> Row:
    highest = max(visit.peak for visit, _ in found)
    ends = [end for _, end in found]
    series = {name: [end.bytes_of(name) for end in ends] for name in _GROWING}
    return Row(
        phase=phase,
        rank=rank,
        count=len(found),
        num_failed=sum(visit.error is not None for visit, _ in found),
        peak=highest,
        is_peak_exact=any(visit.is_peak_exact for visit, _ in found if visit.peak == highest),
        last=ends[-1],
        seconds=sum(visit.seconds for visit, _ in found),
        total=find_growth("all", [sum(s[i] for s in series.values()) for i in range(len(ends))]),
        growing=tuple(growing_classes(series)),
    )
