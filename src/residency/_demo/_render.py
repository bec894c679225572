"""Draws a report for people: facts, a table, the promises and the code. Knows rich, and nothing
about cases.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from residency._demo._report import CaseRow, Promise, Report
from residency._units import format_bytes

_NOTHING = "-"
_WIDTH = 100
_SUMMARY = ("case", "capacity", "stock", "with residency", "identical", "held")
_LEGEND = (
    "capacity: the bytes that both runs may have. identical: with residency the run ends with the "
    "same bytes as stock code without a limit: weights, optimizer state, losses. held: every "
    "promise of the case came true."
)
_COLUMNS = ("run", "capacity", "peak", "outcome", "train loss", "held out", "identical")


def print_report(report: Report, summary: str) -> None:
    """Prints a report on stdout, as wide as the terminal; a file or a pipe has a fixed width."""
    render_report(report, summary, _console())


def _console() -> Console:
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH
    return console


def print_summary(reports: Sequence[Report]) -> None:
    """Prints a table with a row for each case on stdout; nothing where there is one case."""
    if len(reports) > 1:
        render_summary(reports, _console())


def render_summary(reports: Sequence[Report], console: Console) -> None:
    """Prints a table with a row for each case."""
    table = Table(*_SUMMARY, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for report in reports:
        table.add_row(*(escape(cell) for cell in summary_cells(report)))
    console.print(table)
    console.print(_LEGEND, highlight=False)


def summary_cells(report: Report) -> tuple[str, ...]:
    """Returns the cells of a case's row, in the order of the table's columns."""
    stock, ours = report.stock, report.ours
    return (
        report.case,
        "none" if stock.capacity_bytes is None else format_bytes(stock.capacity_bytes),
        _outcome(stock),
        f"{_outcome(ours)},\npeak {format_bytes(ours.peak_bytes)}",
        _identical(ours),
        "yes" if report.is_held() else "NO",
    )


def render_report(report: Report, summary: str, console: Console) -> None:
    """Prints a report.

    Args:
        report: What a case found.
        summary: What the case is.
        console: Where to print; its width decides how the table folds.
    """
    console.print(f"[bold]{escape(report.case)}[/] on {escape(report.device)}")
    console.print(escape(summary), highlight=False)
    for label, text in report.facts.items():
        console.print(f"  {escape(label)}: {escape(text)}", highlight=False)
    table = Table(*_COLUMNS, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in report.rows:
        table.add_row(*(escape(cell) for cell in row_cells(row)))
    console.print(table)
    for promise in report.promises:
        console.print(_promise_line(promise), highlight=False)
    console.print()
    console.print(escape(report.snippet), highlight=False)


def row_cells(row: CaseRow) -> tuple[str, ...]:
    """Returns the cells of a row, in the order of the table's columns."""
    return (
        row.setting,
        "none" if row.capacity_bytes is None else format_bytes(row.capacity_bytes),
        format_bytes(row.peak_bytes),
        _outcome(row),
        _losses(row),
        _loss(row.heldout_loss),
        _identical(row),
    )


def _identical(row: CaseRow) -> str:
    return _NOTHING if row.identical is None else ("yes" if row.identical else "no")


def _outcome(row: CaseRow) -> str:
    return row.outcome if row.phase is None else f"{row.outcome}:\n{row.phase}"


def _losses(row: CaseRow) -> str:
    if row.first_loss is None:
        return _NOTHING
    return f"{_loss(row.first_loss)} to {_loss(row.last_loss)}"


def _loss(loss: float | None) -> str:
    return _NOTHING if loss is None else f"{loss:.3f}"


def _promise_line(promise: Promise) -> str:
    word = "[green]held  [/]" if promise.held else "[bold red]BROKEN[/]"
    return f"{word} {escape(promise.name)}: {escape(promise.detail)}"
