"""The page of a dry run: a timeline of the device by owner, and the table of phases.

One file without scripts, which opens without a network.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from residency._dryrun._answer import Answer
from residency._errors import InvalidArgumentError
from residency._units import MIB, format_bytes

_COLOURS = (
    "#0072b2",
    "#009e73",
    "#d55e00",
    "#cc79a7",
    "#56b4e9",
    "#999999",
)  # told apart by all readers
_PHASE_COLOURS = ("#009e73", "#e69f00", "#0072b2", "#cc79a7", "#d55e00", "#56b4e9", "#999933")
_WIDTH, _HEIGHT, _LEFT, _BAR = 1080, 380, 70, 18
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


def write_page(answer: Answer, file: Path) -> None:
    """Writes the page.

    Raises:
        InvalidArgumentError: The file cannot be written.
    """
    found = answer.found
    verdict = "<b class='yes'>fits</b>" if answer.fits else "<b class='no'>does not fit</b>"
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        f"<title>residency dry-run</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(' '.join(found['argv']))}</h1>",
        f"<p>{verdict}: peak {format_bytes(answer.needed)} of {format_bytes(answer.capacity)}, a "
        f"context of {format_bytes(answer.context)} among it ({escape(answer.title)})</p>",
        *(
            f"<p class='no'>out of memory in {escape(error['phase'])} at {escape(error['line'])}: "
            f"{format_bytes(error['asked'])} were asked for</p>"
            for error in answer.errors[:3]
        ),
        f"<p class='muted'>{found['steps']} optimizer steps, torch {escape(found['torch'])}, "
        "without a GPU</p>",
        "<h2>Who holds the device's memory</h2>",
        _timeline(answer),
        _table(answer),
        "</body></html>",
    ]
    try:
        file.write_text("\n".join(parts), encoding="utf-8")
    except OSError as error:
        raise InvalidArgumentError(f"{str(file)!r} cannot be written: {error.strerror}.") from None


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
            "what the device has for torch</text>"
        )
    for share in (0.25, 0.5, 0.75, 1.0):
        size = share * answer.peak_reserved
        parts.append(
            f"<text x='{_LEFT - 6}' y='{y(size) + 4:.1f}' text-anchor='end'>"
            f"{format_bytes(int(size) // MIB * MIB)}</text>"
            f"<line x1='{_LEFT}' x2='{_WIDTH}' y1='{y(size):.1f}' y2='{y(size):.1f}' "
            "stroke='#000' stroke-opacity='.08'/>"
        )
    parts += _bars(answer.found["marks"], x)
    parts.append("</svg>")
    keys = "".join(
        f"<span class='key' style='background:{colour}'></span>{kind}"
        for kind, colour in zip(kinds, _COLOURS, strict=True)
    )
    return "".join(parts) + (
        f"<p>{keys} <span class='key' style='background:#1a1a1a;height:2px'></span>reserved by "
        "torch's allocator</p><p class='muted'>From left to right: allocations and frees, in "
        "order.</p>"
    )


def _bars(marks: list[Any], x: Any) -> list[str]:
    names = list(dict.fromkeys(name for _, name in marks))
    parts, first = [], 0
    for end, name in marks:
        width = x(end) - x(first)
        colour = _PHASE_COLOURS[names.index(name) % len(_PHASE_COLOURS)]
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
        f"<th>{name}</th>" for name in ("phase", "visits", "allocated", "reserved", *kinds)
    )
    rows = []
    for phase in answer.found["phases"]:
        cells = [phase["name"], str(phase["visits"])]
        sizes = [phase["peak_allocated"], phase["peak_reserved"]]
        sizes += [phase["at_peak"].get(kind, 0) for kind in kinds]
        cells += [format_bytes(size) for size in sizes]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return (
        "<h2>Phases, each at its peak</h2>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )
