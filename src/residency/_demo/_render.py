"""Draws a report for people: facts, a table, the promises and the code. Knows rich, and nothing
about cases.
"""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from residency._demo._report import Promise, Report, Row
from residency._units import format_bytes

_NOTHING = "-"
_WIDTH = 100
_COLUMNS = ("run", "capacity", "peak", "outcome", "train loss", "held out", "identical")


def print_report(report: Report) -> None:
    """Prints a report on stdout, as wide as the terminal; a file or a pipe has a fixed width."""
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH
    render_report(report, console)


def render_report(report: Report, console: Console) -> None:
    """Prints a report.

    Args:
        report: What a case found.
        console: Where to print; its width decides how the table folds.
    """
    console.print(f"[bold]{escape(report.case)}[/] on {escape(report.device)}")
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


def row_cells(row: Row) -> tuple[str, ...]:
    """Returns the cells of a row, in the order of the table's columns."""
    return (
        row.setting,
        "none" if row.capacity_bytes is None else format_bytes(row.capacity_bytes),
        format_bytes(row.peak_bytes),
        _outcome(row),
        _losses(row),
        _loss(row.heldout_loss),
        _NOTHING if row.identical is None else ("yes" if row.identical else "no"),
    )


def _outcome(row: Row) -> str:
    return row.outcome if row.phase is None else f"{row.outcome}:\n{row.phase}"


def _losses(row: Row) -> str:
    if row.first_loss is None:
        return _NOTHING
    return f"{_loss(row.first_loss)} to {_loss(row.last_loss)}"


def _loss(loss: float | None) -> str:
    return _NOTHING if loss is None else f"{loss:.3f}"


def _promise_line(promise: Promise) -> str:
    word = "[green]held  [/]" if promise.held else "[bold red]BROKEN[/]"
    return f"{word} {escape(promise.name)}: {escape(promise.detail)}"
