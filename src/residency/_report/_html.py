"""One self-contained page: what the run was, how it ended, what grows, a timeline, and the table.

The plotting library's script is in the file, so that it opens without a network.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from residency._report._about import command_of, end_lines, made_text, peak_lines, peak_text
from residency._report._exports import write_text
from residency._report._read import RecordedRun
from residency._report._summary import Row, summarise
from residency._report._table import count_text, growth_lines, growth_text, marks
from residency._report._timeline import COLOURS, timeline
from residency._units import format_bytes

_MEANINGS = {
    "held": "allocated to live tensors",
    "draining": "freed, waiting for a stream",
    "stuck": "free, in segments that live tensors share",
    "pooled": "free, kept by private pools",
    "returnable": "whole free segments: empty_cache gives them back",
    "outside": "used on the device, not by this process's torch",
}
_STYLE = """
body { font: 16px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1240px;
  padding: 0 1rem; color: #1a1a1a; background: #fff; }
h1 { font-size: 1.4rem; margin: 0 0 .3rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; }
table { border-collapse: collapse; } th, td { padding: .25rem .8rem .25rem 0; text-align: right;
  border-bottom: 1px solid #ddd; font-variant-numeric: tabular-nums; white-space: nowrap; }
th:first-child, td:first-child, th:last-child, td:last-child { text-align: left; }
.wide { overflow-x: auto; } .peak { font-size: 1.15rem; } code { overflow-wrap: anywhere; }
.end { color: #b3001b; font-weight: 600; } .warning { color: #8a3b00; }
.key { display: inline-block; width: .8em; height: .8em; margin-right: .4em; }
p { margin: .3rem 0; } .muted { color: #555; }
"""


def write_page(runs: list[RecordedRun], file: Path) -> None:
    """Writes the page of all ranks of a run.

    Raises:
        ModuleNotFoundError: The plotting library is not installed.
        InvalidArgumentError: The file cannot be written.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the page's timeline is drawn with the package plotly, which is not installed. "
            "Install it with: pip install 'residency[report]'",
            name="plotly",
        ) from error
    rows = [row for run in runs for row in summarise(run)]
    parts = [*_heading(runs, rows)]
    for run in runs:
        parts += [f"<h2>Rank {run.rank}</h2>"] * (len(runs) > 1)
        parts.append(timeline(run))
    parts += [_table(rows), *(f"<p class='muted'>{escape(line)}</p>" for line in marks(rows))]
    parts.append(_legend())
    body = "\n".join(parts)
    title = escape(" ".join([runs[0].name, made_text(runs), command_of(runs)]))
    head = f"<meta charset='utf-8'><title>{title}</title>"
    write_text(
        file,
        f"<!doctype html><html lang='en'><head>{head}<link rel='icon' href='data:,'>"
        f"<style>{_STYLE}</style><script>{get_plotlyjs()}</script></head>"
        f"<body>{body}</body></html>",
    )


def _heading(runs: list[RecordedRun], rows: list[Row]) -> Iterator[str]:
    """Yields what a reader must not miss: the run, its peak, how it ended, and what grows."""
    yield f"<h1>Device memory of {escape(', '.join(run.name for run in runs))}</h1>"
    if command := command_of(runs):
        yield f"<p><code>{escape(command)}</code></p>"
    if made := made_text(runs):
        yield f"<p class='muted'>{escape(made)}</p>"
    yield from (f"<p class='peak'>{escape(line)}</p>" for line in peak_lines(runs))
    yield from (f"<p class='end'>{escape(line)}</p>" for line in end_lines(runs))
    yield from (f"<p class='warning'>{escape(line)}</p>" for line in growth_lines(rows))
    warnings = (warning for run in runs for warning in run.warnings)
    yield from (f"<p class='warning'>{escape(warning)}</p>" for warning in warnings)


def _legend() -> str:
    keys = (
        f"<p><span class='key' style='background:{COLOURS[name]}'></span>"
        f"<b>{name}</b>: {meaning}</p>"
        for name, meaning in _MEANINGS.items()
    )
    return "<h2>The meaning of the classes</h2>" + "".join(keys)


def _table(rows: list[Row]) -> str:
    names = ("held", "returnable", "stuck", "draining", "pooled", "outside")
    columns = ("phase", "rank", "count", "peak", *names, "growth per visit")
    head = "".join(f"<th>{name}</th>" for name in columns)
    lines = []
    for row in rows:
        sizes = (row.last.figures.get(name) for name in names)
        held = ["unknown" if size is None else format_bytes(size) for size in sizes]
        cells = [row.phase, str(row.rank), count_text(row), peak_text(row), *held, growth_text(row)]
        lines.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return (
        "<h2>Phases, as at the end of the last visit</h2><div class='wide'>"
        f"<table id='phases'><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
        "</div>"
    )
