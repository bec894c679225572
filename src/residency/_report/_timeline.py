"""The page's timeline: the classes of memory over time, and below it a lane for each phase.

Every lane has its phase's name beside it, so that a still picture can be read; a visit that an
error ended has a cross at its end, and one that never ended is hatched.
"""

from __future__ import annotations

from html import escape
from typing import Any

from residency._report._about import capacity_of
from residency._report._read import Boundary, RecordedRun, RecordedVisit
from residency._units import format_bytes, parse_bytes

COLOURS = {  # from the bottom to the top; colour-blind readers can distinguish them, too
    "held": "#0072b2",
    "draining": "#cc79a7",
    "stuck": "#d55e00",
    "pooled": "#8c6bb1",
    "returnable": "#56b4e9",
    "outside": "#999999",
}
PHASE_COLOURS = ("#009e73", "#e69f00", "#0072b2", "#cc79a7", "#d55e00", "#56b4e9", "#999933")
_ERROR_COLOUR = "#b3001b"
_MAX_POINTS = 4000
_MAX_SPANS = 1500
_MAX_LANES = 16
_LONGEST_NAME = 36
_PLOT_HEIGHT, _LANE_HEIGHT, _MARGINS, _GAP = 380, 26, 110, 26  # pixels


def timeline(run: RecordedRun) -> str:
    """Returns the timeline of one rank, as a part of a page."""
    boundaries = _thin(run.boundaries())
    if not boundaries:
        return "<p>No phase was recorded.</p>"
    lanes = _lanes(run.visits)
    visits = [visit for visit in run.visits if visit.phase in lanes]
    shown = sorted(visits, key=lambda visit: -_length(visit, boundaries))[:_MAX_SPANS]
    plot: str = _figure(run, boundaries, lanes, shown).to_html(
        full_html=False,
        include_plotlyjs=False,
        div_id=f"timeline-rank{run.rank}",
        config={"displaylogo": False, "responsive": True},
    )
    notes = []
    if len(boundaries) < len(run.boundaries()) or len(shown) < len(visits):
        notes.append("A long run: the fullest moment of each stretch is shown.")
    if len(visits) < len(run.visits):
        notes.append(f"The {_MAX_LANES} phases that took the longest have a lane.")
    return plot + "".join(f"<p class='muted'>{note}</p>" for note in notes)


def _figure(
    run: RecordedRun, boundaries: list[Boundary], lanes: list[str], shown: list[RecordedVisit]
) -> Any:
    from plotly import graph_objects as go, subplots

    below = _LANE_HEIGHT * len(lanes)
    both = _PLOT_HEIGHT + _GAP + below
    figure: Any = subplots.make_subplots(
        rows=2,
        cols=1,
        shared_xaxes=True,
        vertical_spacing=_GAP / both,
        row_heights=[_PLOT_HEIGHT, below],
    )
    unit, divisor = _unit(boundaries)
    seconds = [boundary.seconds for boundary in boundaries]
    for name, colour in COLOURS.items():
        sizes = [boundary.bytes_of(name) for boundary in boundaries]
        if any(sizes) or name == "held":
            figure.add_trace(_area(go, name, colour, seconds, sizes, divisor, unit), 1, 1)
    top = _top(shown, boundaries)
    capacity = capacity_of([run]) if capacity_of([run]) <= top else 0
    for trace in _levels(go, shown, boundaries, capacity, divisor, unit):
        figure.add_trace(trace, 1, 1)
    for trace in [*_spans(go, lanes, shown, boundaries), *_crosses(go, lanes, shown)]:
        figure.add_trace(trace, 2, 1)
    figure.update_yaxes(title_text=unit, range=[0, 1.1 * top / divisor or 1], row=1, col=1)
    figure.update_yaxes(
        tickvals=list(range(len(lanes))),
        ticktext=[escape(_short(phase)) for phase in lanes],
        range=[len(lanes) - 0.4, -0.6],
        showgrid=False,
        automargin=True,
        row=2,
        col=1,
    )
    figure.update_xaxes(title_text="seconds since the recording began", row=2, col=1)
    figure.update_layout(
        template="plotly_white",
        font={"size": 14, "color": "#1a1a1a"},
        height=both + _MARGINS,
        barmode="overlay",
        margin={"l": 60, "r": 20, "t": 50, "b": 60},
        hovermode="x unified",
        # Above the plot, where it takes no width from the lanes.
        legend={"orientation": "h", "x": 0, "y": 1.01, "yanchor": "bottom"},
    )
    return figure


def _lanes(visits: list[RecordedVisit]) -> list[str]:
    """Returns the phases that have a lane, in the order in which they first began."""
    seconds: dict[str, float] = {}
    for visit in visits:
        # One that never ended is what a reader looks for.
        took = visit.seconds if visit.end is not None else float("inf")
        seconds[visit.phase] = seconds.get(visit.phase, 0.0) + took
    longest = sorted(seconds, key=lambda phase: -seconds[phase])[:_MAX_LANES]
    return [phase for phase in seconds if phase in longest]


def _length(visit: RecordedVisit, boundaries: list[Boundary]) -> float:
    if visit.end is not None:
        return visit.seconds
    return max(0.0, boundaries[-1].seconds - visit.begin.seconds)


def _short(phase: str) -> str:
    return phase if len(phase) <= _LONGEST_NAME else "\u2026" + phase[1 - _LONGEST_NAME :]


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
    go: Any,
    visits: list[RecordedVisit],
    boundaries: list[Boundary],
    capacity: int,
    divisor: int,
    unit: str,
) -> list[Any]:
    """Returns the lines over the stack: the peaks of the innermost phases, and the capacity if
    it is to be seen.
    """
    outer = {visit.phase.rpartition("/")[0] for visit in visits}
    seconds: list[float | None] = []
    peaks: list[float | None] = []
    for visit in sorted(visits, key=lambda visit: visit.begin.seconds):
        if visit.is_peak_exact and visit.phase not in outer:
            peak = visit.peak / divisor
            seconds += [visit.begin.seconds, visit.begin.seconds + visit.seconds, None]
            peaks += [peak, peak, None]
    lines = []
    if peaks:
        lines.append(("peak held", seconds, peaks, "solid"))
    if capacity:
        ends: list[float | None] = [boundaries[0].seconds, boundaries[-1].seconds]
        lines.append(("capacity", ends, [capacity / divisor] * 2, "dot"))
    return [
        go.Scatter(
            x=x,
            y=y,
            name=name,
            mode="lines",
            line={"color": "#1a1a1a", "width": 1.5, "dash": dash},
            hovertemplate=f"%{{y:.2f}} {unit}",
        )
        for name, x, y, dash in lines
    ]


def _top(visits: list[RecordedVisit], boundaries: list[Boundary]) -> int:
    """Returns what the axis must show: all of the capacity only when half of it was in use."""
    used = [b.reserved + b.bytes_of("outside") for b in boundaries]
    most = max([*used, *(visit.peak for visit in visits if visit.is_peak_exact)], default=0)
    capacity = max((boundary.bytes_of("capacity") for boundary in boundaries), default=0)
    return capacity if 2 * most >= capacity else most


def _spans(
    go: Any, lanes: list[str], visits: list[RecordedVisit], boundaries: list[Boundary]
) -> list[Any]:
    """Returns one set of horizontal bars a phase, each visit at its place in time."""
    colours: dict[str, str] = {}  # phases of one name have one, wherever they are
    for phase in lanes:
        name = phase.rpartition("/")[2]
        colours.setdefault(name, PHASE_COLOURS[len(colours) % len(PHASE_COLOURS)])
    traces = []
    for index, phase in enumerate(lanes):
        mine = [visit for visit in visits if visit.phase == phase]
        colour = colours[phase.rpartition("/")[2]]
        shapes = ["" if visit.end is not None else "/" for visit in mine]
        traces.append(
            go.Bar(
                orientation="h",
                base=[visit.begin.seconds for visit in mine],
                x=[_length(visit, boundaries) for visit in mine],
                y=[index] * len(mine),
                width=0.7,
                name=escape(phase),
                # The line keeps a visit of a millisecond in an hour visible.
                marker={"color": colour, "line": {"color": colour, "width": 1}},
                marker_pattern_shape=shapes,
                hovertext=[_hover_text(visit) for visit in mine],
                hoverinfo="text",
                showlegend=False,
            )
        )
    return traces


def _crosses(go: Any, lanes: list[str], visits: list[RecordedVisit]) -> list[Any]:
    """Returns a cross at the end of every visit that an error ended."""
    failed = [visit for visit in visits if visit.error is not None and visit.end is not None]
    if not failed:
        return []
    return [
        go.Scatter(
            x=[visit.begin.seconds + visit.seconds for visit in failed],
            y=[lanes.index(visit.phase) for visit in failed],
            name="ended in an error",
            mode="markers",
            marker={
                "symbol": "x",
                "size": 10,
                "color": _ERROR_COLOUR,
                "line": {"color": "#fff", "width": 1},
            },
            hoverinfo="skip",  # the bar's own text has the error
        )
    ]


def _hover_text(visit: RecordedVisit) -> str:
    if visit.end is None:
        return escape(f"{visit.phase} #{visit.number}: never ended")
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
