"""One self-contained page: a timeline of the classes with the phases below it, and the table.

The plotting library's script is in the file, so that it opens without a network.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from residency._report._exports import write_text
from residency._report._read import Boundary, RecordedRun, RecordedVisit
from residency._report._summary import Row, summarise
from residency._report._table import footnotes, growth_text
from residency._units import format_bytes, parse_bytes

_COLOURS = {  # from the bottom of the stack to its top; told apart by colour-blind readers, too
    "held": "#0072b2",
    "draining": "#cc79a7",
    "stuck": "#d55e00",
    "pooled": "#8c6bb1",
    "returnable": "#56b4e9",
    "outside": "#999999",
}
_MEANINGS = {
    "held": "allocated to live tensors",
    "draining": "freed, waiting for a stream",
    "stuck": "free, in segments that live tensors share",
    "pooled": "free, kept by private pools",
    "returnable": "whole free segments: empty_cache gives them back",
    "outside": "used on the device, not by this process's torch",
}
_PHASE_COLOURS = ("#009e73", "#e69f00", "#0072b2", "#cc79a7", "#d55e00", "#56b4e9", "#999933")
_MAX_POINTS = 4000
_MAX_SPANS = 1500
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1200px;
  padding: 0 1rem; color: #1a1a1a; background: #fff; }
h1 { font-size: 1.4rem; margin: 0 0 .3rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; }
table { border-collapse: collapse; } th, td { padding: .25rem .8rem .25rem 0; text-align: right;
  border-bottom: 1px solid #ddd; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child, th:last-child, td:last-child { text-align: left; }
.warning { color: #8a3b00; } .key { display: inline-block; width: .8em; height: .8em;
  margin-right: .4em; } p { margin: .3rem 0; } .muted { color: #555; }
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
    parts = [f"<h1>Device memory of {escape(runs[0].name)}</h1>"]
    capacity = max(_capacity(run.boundaries()) for run in runs)
    parts.append(f"<p class='muted'>Capacity {format_bytes(capacity)}.</p>")
    parts += [f"<p class='warning'>{escape(w)}</p>" for run in runs for w in run.warnings]
    parts += [_timeline(run, is_only=len(runs) == 1) for run in runs]
    parts += [_legend(), _table(rows)]
    parts += [f"<p>{escape(line)}</p>" for line in footnotes(rows)]
    body = "\n".join(parts)
    head = f"<meta charset='utf-8'><title>{escape(runs[0].name)}</title>"
    write_text(
        file,
        f"<!doctype html><html lang='en'><head>{head}<link rel='icon' href='data:,'>"
        f"<style>{_STYLE}</style><script>{get_plotlyjs()}</script></head>"
        f"<body>{body}</body></html>",
    )


def _timeline(run: RecordedRun, *, is_only: bool) -> str:
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    spans = [visit for visit in run.visits if visit.end is not None]
    shown = sorted(spans, key=lambda visit: -visit.seconds)[:_MAX_SPANS]
    depth = max((visit.phase.count("/") for visit in shown), default=0) + 1
    figure: Any = make_subplots(
        rows=2,
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.04,
        row_heights=[0.85 - 0.05 * min(depth, 5), 0.15 + 0.05 * min(depth, 5)],
    )
    boundaries = _thin(run.boundaries())
    unit, divisor = _unit(boundaries)
    seconds = [boundary.seconds for boundary in boundaries]
    for name, colour in _COLOURS.items():
        sizes = [boundary.bytes_of(name) for boundary in boundaries]
        if any(sizes) or name == "held":
            figure.add_trace(_area(go, name, colour, seconds, sizes, divisor, unit), 1, 1)
    for trace in _levels(go, shown, boundaries, divisor, unit):
        figure.add_trace(trace, 1, 1)
    for trace in _spans(go, shown):
        figure.add_trace(trace, 2, 1)
    top = 1.1 * _top(shown, boundaries) / divisor
    figure.update_yaxes(title_text=unit, range=[0, top or 1], row=1, col=1)
    figure.update_yaxes(
        title_text="phases", showticklabels=False, range=[depth - 0.4, -0.6], row=2, col=1
    )
    figure.update_xaxes(title_text="seconds", row=2, col=1)
    figure.update_layout(
        template="plotly_white",
        height=460 + 30 * depth,
        barmode="overlay",
        margin={"l": 60, "r": 20, "t": 20, "b": 50},
        hovermode="x unified",
        uniformtext={"minsize": 9, "mode": "hide"},
    )
    title = "" if is_only else f"<h2>Rank {run.rank}</h2>"
    note = ""
    if len(boundaries) < 2 * len(spans) or len(shown) < len(spans):
        note = "<p class='muted'>A long run: the fullest moment of each stretch is shown.</p>"
    plot: str = figure.to_html(
        full_html=False,
        include_plotlyjs=False,
        div_id=f"timeline-rank{run.rank}",
        config={"displaylogo": False, "responsive": True},
    )
    return title + plot + note


def _area(
    go: Any, name: str, colour: str, x: list[float], sizes: list[int], divisor: int, unit: str
) -> Any:
    return go.Scatter(
        x=x,
        y=[size / divisor for size in sizes],
        name=name,
        stackgroup="memory",
        mode="lines",
        line={"color": colour, "width": 0.5},
        fillcolor=colour,
        hovertemplate=f"%{{y:.2f}} {unit}",
    )


def _levels(
    go: Any, visits: list[RecordedVisit], boundaries: list[Boundary], divisor: int, unit: str
) -> list[Any]:
    """Returns the lines over the stack: the peaks of the innermost phases, and the capacity."""
    outer = {visit.phase.rpartition("/")[0] for visit in visits}
    seconds: list[float | None] = []
    peaks: list[float | None] = []
    for visit in sorted(visits, key=lambda visit: visit.begin.seconds):
        is_outer = visit.phase in outer
        if visit.is_peak_exact and not is_outer:
            peak = visit.peak / divisor
            seconds += [visit.begin.seconds, visit.begin.seconds + visit.seconds, None]
            peaks += [peak, peak, None]
    dark = {"color": "#1a1a1a", "width": 1.5}
    hover = f"%{{y:.2f}} {unit}"
    traces = []
    if peaks:
        traces.append(
            go.Scatter(
                x=seconds, y=peaks, name="peak held", mode="lines", line=dark, hovertemplate=hover
            )
        )
    capacity = _capacity(boundaries)
    if capacity:
        ends = [boundaries[0].seconds, boundaries[-1].seconds]
        dotted = {**dark, "dash": "dot"}
        level = [capacity / divisor] * 2
        traces.append(
            go.Scatter(
                x=ends, y=level, name="capacity", mode="lines", line=dotted, hovertemplate=hover
            )
        )
    return traces


def _capacity(boundaries: list[Boundary]) -> int:
    return max((boundary.bytes_of("capacity") for boundary in boundaries), default=0)


def _top(visits: list[RecordedVisit], boundaries: list[Boundary]) -> int:
    """Returns what the axis must show: all of the capacity only when half of it was in use."""
    used = [b.reserved + b.bytes_of("outside") for b in boundaries]
    most = max([*used, *(visit.peak for visit in visits if visit.is_peak_exact)], default=0)
    capacity = _capacity(boundaries)
    return capacity if 2 * most >= capacity else most


def _spans(go: Any, visits: list[RecordedVisit]) -> list[Any]:
    """Returns one set of horizontal bars a phase, each visit at its place in time."""
    traces = []
    names = sorted({visit.phase for visit in visits})
    for index, phase in enumerate(names):
        mine = [visit for visit in visits if visit.phase == phase]
        leaf = escape(phase.rpartition("/")[2])
        traces.append(
            go.Bar(
                orientation="h",
                base=[visit.begin.seconds for visit in mine],
                x=[visit.seconds for visit in mine],
                y=[phase.count("/")] * len(mine),
                width=0.8,
                name=escape(phase),
                text=[leaf] * len(mine),
                textposition="inside",
                insidetextanchor="middle",
                textangle=0,
                marker_color=_PHASE_COLOURS[index % len(_PHASE_COLOURS)],
                hovertext=[_told(visit) for visit in mine],
                hoverinfo="text",
                showlegend=False,
            )
        )
    return traces


def _told(visit: RecordedVisit) -> str:
    bound = "" if visit.is_peak_exact else "<= "
    text = f"{visit.phase} #{visit.number}: {visit.seconds:.3f} s, peak {bound}"
    text += format_bytes(visit.peak)
    return escape(text + (f", {visit.error}" if visit.error else ""))


def _thin(boundaries: list[Boundary]) -> list[Boundary]:
    """Returns at most so many boundaries: of each stretch the one with the most in use."""
    if len(boundaries) <= _MAX_POINTS:
        return boundaries
    stretch = -(-len(boundaries) // _MAX_POINTS)
    return [
        max(boundaries[start : start + stretch], key=lambda boundary: boundary.reserved)
        for start in range(0, len(boundaries), stretch)
    ]


def _unit(boundaries: list[Boundary]) -> tuple[str, int]:
    """Returns the unit in which the largest figure is a small number, and its bytes."""
    largest = max((b.reserved + b.bytes_of("outside") for b in boundaries), default=0)
    unit = format_bytes(largest).rpartition(" ")[2]
    return unit, parse_bytes(f"1 {unit}")


def _legend() -> str:
    keys = (
        f"<p><span class='key' style='background:{_COLOURS[name]}'></span>"
        f"<b>{name}</b>: {meaning}</p>"
        for name, meaning in _MEANINGS.items()
    )
    return "<h2>What the classes mean</h2>" + "".join(keys)


def _table(rows: list[Row]) -> str:
    names = ("held", "returnable", "stuck", "draining", "pooled", "outside")
    columns = ("phase", "rank", "count", "peak", *names, "growth per visit")
    head = "".join(f"<th>{name}</th>" for name in columns)
    lines = []
    for row in rows:
        peak = ("" if row.is_peak_exact else "<= ") + format_bytes(row.peak)
        sizes = (row.last.figures.get(name) for name in names)
        told = ["unknown" if size is None else format_bytes(size) for size in sizes]
        cells = [row.phase, str(row.rank), str(row.count), peak, *told, growth_text(row)]
        lines.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return (
        "<h2>Phases, as at the end of the last visit</h2><table id='phases'><thead><tr>"
        f"{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    )
