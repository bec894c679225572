"""The page of a dry run: a timeline of the device by owner, and the table of phases.

One file without scripts, which opens without a network.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from residency import __version__
from residency._dryrun._answer import Answer, below_first_line, first_line, notes
from residency._errors import InvalidArgumentError
from residency._report import PHASE_COLOURS
from residency._units import MIB, format_bytes

_COLOURS = (
    "#0072b2",
    "#009e73",
    "#d55e00",
    "#cc79a7",
    "#56b4e9",
    "#999999",
)  # all readers can distinguish them
_WIDTH, _HEIGHT, _LEFT, _BAR = 1080, 380, 70, 18
_Scale = Callable[[Any], float]  # from what is shown to the picture
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1180px;
  padding: 0 1rem; color: #1a1a1a; background: #fff; }
h1 { font-size: 1.4rem; margin: 0 0 .3rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; }
p { margin: .2rem 0; } .muted { color: #555; } svg { width: 100%; height: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
.key { display: inline-block; width: .8rem; height: .8rem; margin: 0 .3rem 0 1rem; }
.yes { color: #00684a; } .no { color: #a8320a; }
"""


def write_page(answer: Answer, file: Path, words: Sequence[str]) -> None:
    """Writes the page.

    Args:
        answer: What it shows.
        file: Where it goes.
        words: The command that was run.

    Raises:
        InvalidArgumentError: The file cannot be written.
    """
    found = answer.found
    begin, rest = first_line(answer)
    colour = "yes" if answer.fits else "no"
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        f"<title>residency dry-run</title><style>{_STYLE}</style></head><body>",
        f"<h1><code>{escape(shlex.join(words))}</code></h1>",
        f"<p><b class='{colour}'>{begin}</b>{escape(rest)}</p>",
        *(f"<p class='no'>{escape(text)}</p>" for text in below_first_line(answer)),
        *(f"<p class='muted'>{escape(text)}</p>" for text in notes(answer)),
        f"<p class='muted'>made on {datetime.now():%Y-%m-%d %H:%M} by residency {__version__}, "
        f"with torch {escape(found['torch'])}</p>",
        "<h2>Who holds the device's memory</h2>",
        _timeline(answer),
        _table(answer),
        "</body></html>",
    ]
    try:
        file.write_text("\n".join(parts), encoding="utf-8")
    except OSError as error:
        raise InvalidArgumentError(
            f"the page {str(file)!r} cannot be written: {error.strerror}; name another file."
        ) from None


def _timeline(answer: Answer) -> str:
    points = answer.found["timeline"]
    if not points:
        return "<p>Nothing was on the device.</p>"
    kinds = answer.found["kinds"]
    last = max(1, points[-1][0])
    room = answer.capacity - answer.context
    top = 1.08 * max(answer.peak_reserved, room if 2 * answer.peak_reserved >= room else 0, 1)

    def x(position: int) -> float:
        return float(_LEFT + (_WIDTH - _LEFT) * position / last)

    def y(num_bytes: float) -> float:
        return _HEIGHT * (1 - num_bytes / top)

    parts = [f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT + _BAR + 30}' font-size='12'>"]
    lower = [0] * len(points)
    for number, kind in enumerate(kinds):
        upper = [below + point[1 + number] for below, point in zip(lower, points, strict=True)]
        there = [f"{x(p[0]):.1f},{y(level):.1f}" for p, level in zip(points, upper, strict=True)]
        back = [f"{x(p[0]):.1f},{y(level):.1f}" for p, level in zip(points, lower, strict=True)]
        parts.append(
            f"<polygon fill='{_COLOURS[number]}' points='{' '.join(there + back[::-1])}'>"
            f"<title>{kind}</title></polygon>"
        )
        lower = upper
    reserved = " ".join(f"{x(point[0]):.1f},{y(point[-1]):.1f}" for point in points)
    parts.append(f"<polyline fill='none' stroke='#1a1a1a' points='{reserved}'/>")
    if room <= top:
        level = f"{y(room):.1f}"
        parts.append(
            f"<line x1='{_LEFT}' x2='{_WIDTH}' y1='{level}' y2='{level}' stroke='#a8320a' "
            "stroke-dasharray='6 4'/>"
            f"<text x='{_WIDTH}' y='{y(room) - 4:.1f}' text-anchor='end' fill='#a8320a'>"
            "the device's memory for torch</text>"
        )
    for share in (0.25, 0.5, 0.75, 1.0):
        size = share * answer.peak_reserved
        parts.append(
            f"<text x='{_LEFT - 6}' y='{y(size) + 4:.1f}' text-anchor='end'>"
            f"{format_bytes(int(size) // MIB * MIB)}</text>"
            f"<line x1='{_LEFT}' x2='{_WIDTH}' y1='{y(size):.1f}' y2='{y(size):.1f}' "
            "stroke='#000' stroke-opacity='.08'/>"
        )
    parts += _peak(answer, x, y)
    parts += _bars(answer.found["marks"], x)
    parts.append("</svg>")
    return "".join(parts) + (
        _keys(dict(zip(kinds, _COLOURS, strict=True)), "Held by")
        + " <span class='key' style='background:#1a1a1a;height:2px'></span>reserved by torch's "
        + "allocator</p>"
        + _keys(_colours(answer.found["marks"]), "Phases")
        + "</p><p class='muted'>From left to right: allocations and frees, in order.</p>"
    )


def _peak(answer: Answer, x: _Scale, y: _Scale) -> list[str]:
    """Returns a point and words for the moment at which tensors held the most."""
    point = max(answer.found["timeline"], key=lambda each: sum(each[1:-1]))
    held = sum(point[1:-1])
    phase = next((name for end, name in answer.found["marks"] if end > point[0]), "")
    is_left = x(point[0]) < _WIDTH / 2
    place = x(point[0]) + (8 if is_left else -8)
    return [
        f"<circle cx='{x(point[0]):.1f}' cy='{y(held):.1f}' r='4' fill='#1a1a1a'/>"
        f"<text x='{place:.1f}' y='{y(held) - 8:.1f}' font-weight='bold' "
        f"text-anchor='{'start' if is_left else 'end'}'>"
        f"{format_bytes(held)} allocated in {escape(phase)}</text>"
    ]


def _colours(marks: Sequence[Any]) -> dict[str, str]:
    names = dict.fromkeys(name for _, name in marks)
    return {name: PHASE_COLOURS[number % len(PHASE_COLOURS)] for number, name in enumerate(names)}


def _keys(colours: dict[str, str], what: str) -> str:
    return f"<p><span class='muted'>{what}:</span>" + "".join(
        f" <span class='key' style='background:{colour}'></span>{escape(name)}"
        for name, colour in colours.items()
    )


def _bars(marks: list[Any], x: _Scale) -> list[str]:
    colours = _colours(marks)
    parts, first = [], 0
    for end, name in marks:
        width = x(end) - x(first)
        colour = colours[name]
        label = escape(name)
        parts.append(
            f"<rect x='{x(first):.1f}' y='{_HEIGHT + 6}' width='{width:.1f}' height='{_BAR}' "
            f"fill='{colour}'><title>{label}</title></rect>"
        )
        if width > 8 * len(name):
            parts.append(
                f"<text x='{x(first) + 4:.1f}' y='{_HEIGHT + _BAR + 1}' fill='#fff'>{label}</text>"
            )
        first = end
    return parts


def _table(answer: Answer) -> str:
    kinds = answer.found["kinds"]
    head = "".join(
        f"<th>{name}</th>"
        for name in ("phase", "visits", "allocated", "reserved", "headroom", *kinds)
    )
    rows = []
    for phase in answer.found["phases"]:
        cells = [phase["name"], str(phase["visits"])]
        headroom = answer.capacity - answer.context - phase["peak_reserved"]
        sizes = [phase["peak_allocated"], phase["peak_reserved"], headroom]
        sizes += [phase["at_peak"].get(kind, 0) for kind in kinds]
        cells += [format_bytes(size) for size in sizes]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return (
        "<h2>Phases, each at its peak</h2>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )
