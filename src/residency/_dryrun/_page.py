"""The page of a dry run: a timeline of the device by owner, and the table of phases.

One file without scripts, which opens without a network, on a light or a dark screen of any width.
Colours are the owners' alone: each phase has a row with its name.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from residency import __version__
from residency._dryrun._answer import (
    Answer,
    below_first_line,
    first_line,
    foundations,
    notes,
    of_second_run,
)
from residency._errors import InvalidArgumentError
from residency._units import format_bytes, parse_bytes

_COLOURS = (
    "#2b7bba",
    "#009e73",
    "#d55e00",
    "#cc79a7",
    "#56b4e9",
    "#999999",
)  # all readers can distinguish them, on light and dark
_WIDTH, _HEIGHT, _LEFT, _LANE, _LABEL = 1080, 380, 132, 22, 8.5  # the last: a letter's width
_MOST_TICKS = 6
_Scale = Callable[[Any], float]  # from what is shown to the picture
_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --soft: #555; --line: #ddd; --page: #fff;
  --phase: #64748b; --good: #00684a; --bad: #a8320a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --soft: #a8adb3; --line: #3a3f45;
  --page: #16191d; --phase: #8391a5; --good: #4cc79a; --bad: #ff9166; } }
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.5rem auto; max-width: 1180px;
  padding: 0 1rem; color: var(--ink); background: var(--page); }
h1 { font-size: 1.3rem; margin: 0 0 .3rem; } h2 { font-size: 1.1rem; margin: 1.8rem 0 .4rem; }
p { margin: .2rem 0; overflow-wrap: anywhere; } h1 code { overflow-wrap: anywhere; }
.muted { color: var(--soft); } .yes { color: var(--good); } .no { color: var(--bad); }
.wide { overflow-x: auto; } .wide:focus-visible { outline: 2px solid var(--phase); }
svg { display: block; width: 100%; min-width: 780px; height: auto; } svg text { fill: var(--ink);
  paint-order: stroke; stroke: var(--page); stroke-width: 4px; }
svg .soft { fill: var(--soft); } svg .card { fill: var(--bad); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
.keys span { white-space: nowrap; margin-right: 1rem; }
.keys i { display: inline-block; width: .8rem; height: .8rem; margin-right: .3rem; }
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
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        "<link rel='icon' href='data:,'>",
        f"<title>residency dry-run</title><style>{_STYLE}</style></head><body>",
        f"<h1><code>{escape(shlex.join(words))}</code></h1>",
        f"<p><b class='{colour}'>{begin}</b>{escape(rest)}</p>",
        *(f"<p class='no'>{escape(text)}</p>" for text in below_first_line(answer)),
        *(
            f"<p class='muted'>{escape(text)}</p>"
            for text in (*notes(answer), *foundations(answer))
        ),
        f"<p class='muted'>made on {datetime.now():%Y-%m-%d %H:%M} by residency {__version__}, "
        f"with torch {escape(found['torch'])}</p>",
        "<h2>Who holds the device's memory</h2>",
        *(
            f"<p>The script ran out of memory on the card; {text}.</p>"
            for text in of_second_run(answer)
        ),
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
    last = max(1, points[-1][0])
    is_card_seen = 2 * answer.peak_reserved >= answer.capacity - answer.context
    top = 1.08 * max(answer.peak_reserved, answer.capacity if is_card_seen else 0, 1)

    def x(position: int) -> float:
        return float(_LEFT + (_WIDTH - _LEFT) * position / last)

    def y(num_bytes: float) -> float:
        return _HEIGHT * (1 - num_bytes / top)

    marks = answer.found["marks"]
    lanes = {name: number for number, name in enumerate(dict.fromkeys(name for _, name in marks))}
    height = _HEIGHT + _LANE * len(lanes) + 10
    parts = [f"<svg viewBox='0 0 {_WIDTH} {height}' font-size='14' role='img'>", *_ticks(top, y)]
    parts += _areas(answer, x, y)
    reserved = " ".join(f"{x(point[0]):.1f},{y(point[-1]):.1f}" for point in points)
    parts.append(f"<polyline fill='none' stroke='var(--ink)' points='{reserved}'/>")
    if is_card_seen:
        parts += _card(answer, y)
    parts += [*_peak(answer, x, y), *_lanes(marks, lanes, x), "</svg>"]
    above = "" if is_card_seen else f" The card's {format_bytes(answer.capacity)} lie above it."
    return (
        f"{_scrolled('the timeline', ''.join(parts))}{_keys(answer)}"
        f"<p class='muted'>From left to right: allocations and frees, in order.{above}</p>"
    )


def _scrolled(name: str, content: str) -> str:
    """Returns content that may be wider than the screen; keys move it, too."""
    return f"<div class='wide' tabindex='0' role='region' aria-label='{name}'>{content}</div>"


def _kinds(answer: Answer) -> dict[str, tuple[int, str]]:
    """Returns the owners that hold anything at a time: the place in a point, and the colour."""
    found = answer.found
    peaks = [phase["at_peak"] for phase in found["phases"]]
    return {
        kind: (1 + number, _COLOURS[number])
        for number, kind in enumerate(found["kinds"])
        if any(point[1 + number] for point in found["timeline"])
        or any(peak.get(kind) for peak in peaks)
    }


def _unit(num_bytes: float) -> tuple[str, int]:
    """Returns the unit in which a size is read, and its bytes."""
    unit = "GiB" if num_bytes >= parse_bytes("1GiB") else "MiB"
    return unit, parse_bytes(f"1{unit}")


def _ticks(top: float, y: _Scale) -> list[str]:
    """Returns lines at round sizes, with their labels."""
    unit, divisor = _unit(top / 4)  # at least four lines
    step = next(
        number * 10**power
        for power in range(12)
        for number in (1, 2, 5)
        if top / divisor <= _MOST_TICKS * number * 10**power
    )
    parts = []
    for size in range(0, int(top / divisor) + 1, step):
        level = f"{y(size * divisor):.1f}"
        parts.append(
            f"<text class='soft' x='{_LEFT - 8}' y='{y(size * divisor) + 4:.1f}' "
            f"text-anchor='end'>{size:,} {unit}</text>"
            f"<line x1='{_LEFT}' x2='{_WIDTH}' y1='{level}' y2='{level}' stroke='var(--line)'/>"
        )
    return parts


def _areas(answer: Answer, x: _Scale, y: _Scale) -> list[str]:
    """Returns an area for each owner, one upon the other."""
    points = answer.found["timeline"]
    parts = []
    lower = [0] * len(points)
    for kind, (place, colour) in _kinds(answer).items():
        upper = [below + point[place] for below, point in zip(lower, points, strict=True)]
        there = [f"{x(p[0]):.1f},{y(level):.1f}" for p, level in zip(points, upper, strict=True)]
        back = [f"{x(p[0]):.1f},{y(level):.1f}" for p, level in zip(points, lower, strict=True)]
        parts.append(
            f"<polygon fill='{colour}' points='{' '.join(there + back[::-1])}'>"
            f"<title>{kind}</title></polygon>"
        )
        lower = upper
    return parts


def _card(answer: Answer, y: _Scale) -> list[str]:
    """Returns the line of the card, and below it the band that is not torch's."""
    card, room = y(answer.capacity), y(answer.capacity - answer.context)
    return [
        f"<rect x='{_LEFT}' width='{_WIDTH - _LEFT}' y='{card:.1f}' height='{room - card:.1f}' "
        "fill='var(--bad)' fill-opacity='.22'/>"
        f"<line x1='{_LEFT}' x2='{_WIDTH}' y1='{card:.1f}' y2='{card:.1f}' stroke='var(--bad)' "
        "stroke-width='2'/>"
        f"<text class='card' x='{_WIDTH}' y='{card - 6:.1f}' text-anchor='end'>"
        f"the card: {format_bytes(answer.capacity)}; the band is the context: "
        f"{format_bytes(answer.context)}, not torch's</text>"
    ]


def _peak(answer: Answer, x: _Scale, y: _Scale) -> list[str]:
    """Returns a point and words for the moment at which tensors held the most."""
    point = max(answer.found["timeline"], key=lambda each: sum(each[1:-1]))
    held = sum(point[1:-1])
    phase = next((name for end, name in answer.found["marks"] if end > point[0]), "")
    is_left = x(point[0]) < _WIDTH / 2
    place = x(point[0]) + (8 if is_left else -8)
    above = max(y(answer.peak_reserved), 16)  # above the line of reserved bytes, which it hides
    return [
        f"<circle cx='{x(point[0]):.1f}' cy='{y(held):.1f}' r='4' fill='var(--ink)'/>"
        f"<text x='{place:.1f}' y='{above - 7:.1f}' font-weight='bold' "
        f"text-anchor='{'start' if is_left else 'end'}'>"
        f"{format_bytes(held)} allocated in {escape(phase)}</text>"
    ]


def _keys(answer: Answer) -> str:
    keys = "".join(
        f"<span><i style='background:{colour}'></i>{escape(kind)}</span> "
        for kind, (_, colour) in _kinds(answer).items()
    )
    return (
        f"<p class='keys'>{keys}<span><i style='background:var(--ink);height:2px'></i>"
        "reserved by torch's allocator</span></p>"
    )


def _lanes(marks: list[Any], lanes: dict[str, int], x: _Scale) -> list[str]:
    """Returns a row for each phase, with its name and a bar for each visit."""
    parts = [
        f"<text class='soft' x='{_LEFT - 8}' y='{_HEIGHT + _LANE * (lane + 1):.1f}' "
        f"text-anchor='end'>{escape(_short(name))}</text>"
        for name, lane in lanes.items()
    ]
    first = 0
    for end, name in marks:
        width = max(x(end) - x(first), 1.5)  # a short visit is seen, too
        parts.append(
            f"<rect x='{x(first):.1f}' y='{_HEIGHT + _LANE * lanes[name] + 9}' "
            f"width='{width:.1f}' height='{_LANE - 7}' fill='var(--phase)'>"
            f"<title>{escape(name)}</title></rect>"
        )
        first = end
    return parts


def _short(name: str) -> str:
    most = int((_LEFT - 8) / _LABEL)
    return name if len(name) <= most else name[: most - 1] + "\u2026"


def _table(answer: Answer) -> str:
    unit, divisor = _unit(answer.peak_reserved)
    kinds = list(_kinds(answer))
    head = "".join(
        f"<th scope='col'>{name}</th>"
        for name in ("phase", "visits", "allocated", "reserved", "headroom", *kinds)
    )
    rows = []
    for phase in answer.found["phases"]:
        headroom = answer.capacity - answer.context - phase["peak_reserved"]
        sizes = [phase["peak_allocated"], phase["peak_reserved"], headroom]
        sizes += [phase["at_peak"].get(kind, 0) for kind in kinds]
        cells = [phase["name"], str(phase["visits"])]
        cells += [f"{size / divisor:,.2f}" if size else "-" for size in sizes]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f"<h2>Phases, each at its peak, in {unit}</h2>{_scrolled('the phases', table)}"
