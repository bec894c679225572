"""The report for a terminal, and the Markdown table that compares two runs."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from residency._report._about import command_of, end_lines, made_text, peak_lines, peak_text
from residency._report._read import RecordedRun
from residency._report._summary import Row, merged, summarise, whole_run
from residency._units import format_bytes

_NOTHING = "-"
_WIDTH = 150
_GROWTH = "growth per visit"
_BORDERS = 3  # of the table; between columns there are two spaces
_SHOWN = ("held", "returnable", "stuck", "draining", "pooled", "outside")
_ALWAYS = frozenset({"held", "returnable", "stuck"})


def print_report(runs: list[RecordedRun]) -> None:
    """Prints a table of the phases of all ranks, and below it what grows and what was not exact."""
    rows = [row for run in runs for row in summarise(run)]
    shown = [n for n in _SHOWN if n in _ALWAYS or any(row.last.bytes_of(n) for row in rows)]
    has_ranks = len(runs) > 1
    columns = ["phase", *["rank"] * has_ranks, "count", "peak", *shown, _GROWTH]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        is_left = name in ("phase", _GROWTH)
        table.add_column(name, justify="left" if is_left else "right", no_wrap=name != _GROWTH)
    lines = []
    for row in rows:
        rank = [str(row.rank)] * has_ranks
        figures = [_size(row.last.figures.get(name)) for name in shown]
        cells = [row.phase, *rank, count_text(row), peak_text(row), *figures, growth_text(row)]
        lines.append(cells)
        table.add_row(*map(escape, cells))
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH
    for line in _heading(runs):
        console.print(escape(line), highlight=False)
    if _least_width([columns, *lines]) <= console.width or not lines:
        console.print(table)
    else:  # figures that are cut off say nothing
        for cells in lines:
            console.print(escape(cells[0]), style="bold", highlight=False)
            for name, cell in zip(columns[1:], cells[1:], strict=True):
                console.print(escape(f"  {name:<17}{cell}"), highlight=False)
    for line in [*marks(rows), *growth_lines(rows)]:
        console.print(escape(line), highlight=False)


def _least_width(rows: list[list[str]]) -> int:
    """Returns the width in which only the last column is broken into lines."""
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    longest_word = max(len(word) for row in rows for word in row[-1].split())
    return sum(widths[:-1]) + longest_word + _BORDERS


def marks(rows: list[Row]) -> Iterator[str]:
    """Yields what the marks in the table mean."""
    if any(not row.is_peak_exact for row in rows):
        yield "<= an upper bound: torch's peak register did not rise in the phase, or was reset."


def growth_lines(rows: list[Row]) -> Iterator[str]:
    """Yields a line for every class of memory that grows at the end of a phase."""
    for row in rows:
        for growth in row.growing:
            yield f"growing at the end of {row.phase} (rank {row.rank}): {growth}"


def compare(before: list[RecordedRun], after: list[RecordedRun]) -> str:
    """Returns the Markdown table of two runs, of the rank that has the most in each phase.

    A phase that only one of the runs has is compared with that of the same last name in the other:
    ``save`` with ``train/save``.
    """
    lines = [
        f"| phase | {' | '.join(f'{name} before | {name} after' for name in ('peak', 'held'))} "
        "| reserved before | reserved after | growth per visit before | after |",
        "|---|" + "---:|" * 6 + "---|---|",
    ]
    pairs = [("whole run", whole_run(before), whole_run(after)), *_pairs(before, after)]
    for name, *pair in pairs:
        cells = [_NOTHING if row is None else peak_text(row) for row in pair]
        cells += [_NOTHING if row is None else _size(row.last.bytes_of("held")) for row in pair]
        cells += [_NOTHING if row is None else _size(row.last.reserved) for row in pair]
        cells += [_NOTHING if row is None else growth_text(row) for row in pair]
        # A bar would end the cell.
        lines.append("| " + " | ".join(c.replace("|", "\\|") for c in [name, *cells]) + " |")
    for name, runs in (("before", before), ("after", after)):
        lines += (f"\n{name}: {line}" for line in end_lines(runs))
    return "\n".join(lines)


def _pairs(
    before: list[RecordedRun], after: list[RecordedRun]
) -> Iterator[tuple[str, Row | None, Row | None]]:
    """Yields the phases of two runs side by side: by their paths, else by their last names."""
    old, new = _highest(before), _highest(after)
    seen = set()
    for phase in [*old, *new]:
        name = phase.rpartition("/")[2]
        if phase in seen:
            continue
        if phase in old and phase in new:
            seen.add(phase)
            yield phase, old[phase], new[phase]
            continue
        mine = [p for p in old if p not in new and p.rpartition("/")[2] == name]
        theirs = [p for p in new if p not in old and p.rpartition("/")[2] == name]
        if not mine or not theirs:
            seen.add(phase)
            yield phase, old.get(phase), new.get(phase)
            continue
        seen.update(mine, theirs)
        title = f"{', '.join(mine)} (after: {', '.join(theirs)})"
        yield title, merged(name, [old[p] for p in mine]), merged(name, [new[p] for p in theirs])


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


def _heading(runs: list[RecordedRun]) -> Iterator[str]:
    """Yields what stands above the table; the table's classes are those of its last line."""
    yield ", ".join(run.name for run in runs)
    yield from filter(None, (command_of(runs), made_text(runs)))
    yield from peak_lines(runs)
    yield from end_lines(runs)
    yield "classes as at the end of the last visit"


def count_text(row: Row) -> str:
    """Says how many visits ended, and how many of them by an error."""
    return f"{row.count} ({row.num_failed} failed)" if row.num_failed else str(row.count)


def _size(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else format_bytes(num_bytes)
