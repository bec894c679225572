"""What a run was and how it ended: its command, date and versions, its peak, and its error."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from residency._memory import asked_bytes
from residency._report._fields import FAILED
from residency._report._read import RecordedRun, RecordedVisit
from residency._report._summary import Row, whole_run
from residency._units import format_bytes

_LONGEST_ERROR = 300
NO_DEVICE = (
    "there was no accelerator, so no device memory was used. A machine without a GPU can still "
    "tell what one would show: residency dry-run --device l4 -- python train.py"
)
_MOST_KINDS = 3  # of errors besides the last


def capacity_of(runs: list[RecordedRun]) -> int:
    """Returns the bytes of the device, the largest of all ranks."""
    return max((b.bytes_of("capacity") for run in runs for b in run.boundaries()), default=0)


def has_device(runs: list[RecordedRun]) -> bool:
    """Returns whether an accelerator was there at any boundary of a phase."""
    return capacity_of(runs) > 0


def peak_text(row: Row) -> str:
    """Returns a phase's peak, marked where it is an upper bound."""
    return ("" if row.is_peak_exact else "<= ") + format_bytes(row.peak)


def peak_lines(runs: list[RecordedRun]) -> Iterator[str]:
    """Yields the peak of the whole run, of the rank that has the most, and the capacity."""
    highest = whole_run(runs)
    if highest is None:
        return
    if not has_device(runs):
        yield NO_DEVICE
        return
    when = "in or before a phase"
    if highest.is_peak_exact:
        when = f"in {highest.phase}" if highest.phase else "after the last phase"
    rank = f" of rank {highest.rank}" * (len(runs) > 1)
    capacity = capacity_of(runs)
    room = f", capacity {format_bytes(capacity)}" * (capacity > 0)
    yield f"peak {peak_text(highest)} {when}{rank}{room}"


def command_of(runs: list[RecordedRun]) -> str:
    """Returns the command that was run; nothing where the record does not say it."""
    return str(runs[0].header.get("command") or "")


def made_text(runs: list[RecordedRun]) -> str:
    """Returns the date of a run, its duration and its versions, as far as its record says them."""
    header = runs[0].header
    parts = [
        _date(float(header.get("started_at", 0.0))),
        _duration(runs),
        *(
            f"{name} {header[name]}"
            for name in ("torch", "residency", "python")
            if header.get(name)
        ),
    ]
    return ", ".join(filter(None, parts))


def end_lines(runs: list[RecordedRun]) -> list[str]:
    """Returns how the run ended, for each rank that did not end in order or had an error."""
    return [line for run in runs for line in _end_of(run)]


def _end_of(run: RecordedRun) -> Iterator[str]:
    failed = [visit for visit in run.visits if visit.error is not None]
    if run.is_closed and run.error is not None:
        where = f"in {run.error_phase}" if run.error_phase else _outside(run)
        yield f"{run.name}: the run ended in an error, {where}: {_said(run.error)}"
        return
    if not run.is_closed:
        yield f"{run.name}: {_cut_off(run)}"
    innermost = _innermost(failed)
    if innermost is not None:
        yield (
            f"{run.name}: {_count(len(failed), 'visit')} of phases ended in an error, the last in "
            f"{innermost.phase} (visit {innermost.number}): {_said(innermost.error or '')}"
        )
        yield from (f"{run.name}: {line}" for line in _other_errors(failed, innermost))
    num_failed = _failed_allocations(run)
    if num_failed:
        yield f"{run.name}: {_count(num_failed, 'allocation')} failed, out of memory"


def _other_errors(failed: list[RecordedVisit], last: RecordedVisit) -> Iterator[str]:
    """Yields the kinds of errors that the last one would hide, the newest of each kind."""
    kinds: dict[str, list[RecordedVisit]] = {}
    for visit in failed:
        kinds.setdefault((visit.error or "").partition(":")[0], []).append(visit)
    kinds.pop((last.error or "").partition(":")[0], None)
    for name, visits in list(kinds.items())[:_MOST_KINDS]:
        newest = _innermost(visits) or visits[-1]
        yield (
            f"{_count(len(visits), 'visit')} of these in {name}, the last in {newest.phase} "
            f"(visit {newest.number}): {_said(newest.error or '')}"
        )


def _cut_off(run: RecordedRun) -> str:
    """Says where a run was when its record ends without a last line."""
    text = "the record has no end: the process was killed, or left by os._exit, or still runs"
    open_visits = [visit for visit in run.visits if visit.end is None]
    if open_visits:
        last = open_visits[-1]
        return f"{text}; it was in {last.phase} (visit {last.number})"
    return f"{text}; it was {_outside(run)}"


def _outside(run: RecordedRun) -> str:
    ended = [visit for visit in run.visits if visit.end is not None]
    last = max(ended, key=lambda visit: visit.end.seconds if visit.end else 0.0, default=None)
    return "outside of every phase" + (f", after {last.phase}" if last is not None else "")


def _innermost(failed: list[RecordedVisit]) -> RecordedVisit | None:
    """Returns the visit in which the last error was raised: of those that it left, the deepest."""
    if not failed:
        return None
    last = max(failed, key=lambda visit: visit.end.seconds if visit.end else 0.0)
    inside = [
        visit
        for visit in failed
        if visit.error == last.error
        and f"{visit.phase}/".startswith(f"{last.phase}/")
        and visit.begin.seconds >= last.begin.seconds
    ]
    return max(inside, key=lambda visit: visit.phase.count("/"))


def _failed_allocations(run: RecordedRun) -> int:
    counts = [int(boundary.figures.get(FAILED) or 0) for boundary in run.boundaries()]
    return max([*counts, run.num_failed]) - counts[0] if counts else run.num_failed


def _said(error: str) -> str:
    asked = asked_bytes(error)
    size = f"{format_bytes(asked)} were asked for. " if asked is not None else ""
    short = error if len(error) <= _LONGEST_ERROR else error[:_LONGEST_ERROR] + " ..."
    return size + short


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _duration(runs: list[RecordedRun]) -> str:
    last = max((b.seconds for run in runs for b in run.boundaries()), default=0.0)
    return f"{last:,.1f} s" if last else ""


def _date(started_at: float) -> str:
    try:
        moment = datetime.fromtimestamp(started_at, UTC)
    except (OverflowError, OSError, ValueError):  # of a year that no calendar has
        return ""
    return f"{moment:%Y-%m-%d %H:%M} UTC" if started_at else ""
