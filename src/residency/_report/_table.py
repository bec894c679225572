"""The report for a terminal, and the Markdown table that compares two runs."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from residency._report._read import RecordedRun
from residency._report._summary import Row, summarise
from residency._units import format_bytes

_NOTHING = "-"
_WIDTH = 150
_SHOWN = ("held", "returnable", "stuck", "draining", "pooled", "outside")
_ALWAYS = frozenset({"held", "returnable", "stuck"})


def print_report(runs: list[RecordedRun]) -> None:
    """Prints a table of the phases of all ranks, and below it what grows and what was not exact."""
    rows = [row for run in runs for row in summarise(run)]
    shown = [n for n in _SHOWN if n in _ALWAYS or any(row.last.bytes_of(n) for row in rows)]
    has_ranks = len(runs) > 1
    columns = ["phase", *["rank"] * has_ranks, "count", "peak", *shown, "growth per visit"]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        is_text = name in ("phase", "growth per visit")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text)
    lines = []
    for row in rows:
        rank = [str(row.rank)] * has_ranks
        figures = [_size(row.last.figures.get(name)) for name in shown]
        cells = [row.phase, *rank, _count(row), _peak(row), *figures, growth_text(row)]
        lines.append(cells)
        table.add_row(*map(escape, cells))
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH
    console.print(escape(_title(runs)), highlight=False)
    if Measurement.get(console, console.options, table).minimum < console.width or not lines:
        console.print(table)
    else:  # figures that are cut off say nothing
        for cells in lines:
            console.print(escape(cells[0]), style="bold", highlight=False)
            for name, cell in zip(columns[1:], cells[1:], strict=True):
                console.print(escape(f"  {name:<17}{cell}"), highlight=False)
    for line in footnotes(rows):
        console.print(escape(line), highlight=False)


def footnotes(rows: list[Row]) -> Iterator[str]:
    """Yields what explains the table: marks, and every phase that grows."""
    if any(not row.is_peak_exact for row in rows):
        yield "<= an upper bound: torch's peak register did not rise in the phase, or was reset."
    for row in rows:
        for growth in row.growing:
            yield f"growing at the end of {row.phase} (rank {row.rank}): {growth}"


def compare(before: list[RecordedRun], after: list[RecordedRun]) -> str:
    """Returns the Markdown table of two runs' phases, of the rank that has the most in each."""
    old, new = _highest(before), _highest(after)
    lines = [
        f"| phase | {' | '.join(f'{name} before | {name} after' for name in ('peak', 'held'))} "
        "| reserved before | reserved after | growth per visit before | after |",
        "|---|" + "---:|" * 6 + "---|---|",
    ]
    for phase in dict.fromkeys([*old, *new]):
        pair = (old.get(phase), new.get(phase))
        cells = [_NOTHING if row is None else _peak(row) for row in pair]
        cells += [_NOTHING if row is None else _size(row.last.bytes_of("held")) for row in pair]
        cells += [_NOTHING if row is None else _size(row.last.reserved) for row in pair]
        cells += [_NOTHING if row is None else growth_text(row) for row in pair]
        # A bar would end the cell.
        lines.append("| " + " | ".join(c.replace("|", "\\|") for c in [phase, *cells]) + " |")
    return "\n".join(lines)


def growth_text(row: Row) -> str:
    """Says in a few words how a phase's memory goes from visit to visit."""
    if row.growing:
        parts = (f"+{format_bytes(round(g.bytes_per_visit))} {g.name}" for g in row.growing)
        return ", ".join(parts)
    return _NOTHING if row.total is None else "none"


def _highest(runs: list[RecordedRun]) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for row in (row for run in runs for row in summarise(run)):
        known = rows.get(row.phase)
        if known is None or row.peak > known.peak:
            rows[row.phase] = row
    return rows


def _title(runs: list[RecordedRun]) -> str:
    names = ", ".join(run.name for run in runs)
    capacity = max((b.bytes_of("capacity") for run in runs for b in run.boundaries()), default=0)
    return f"{names}: capacity {format_bytes(capacity)}; classes as at the end of the last visit"


def _count(row: Row) -> str:
    return f"{row.count} ({row.num_failed} failed)" if row.num_failed else str(row.count)


def _peak(row: Row) -> str:
    return ("" if row.is_peak_exact else "<= ") + format_bytes(row.peak)


def _size(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else format_bytes(num_bytes)
