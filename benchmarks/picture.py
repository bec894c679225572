"""Draws the two pictures of the README: the demo's cases, and a card's figures.

``python -m benchmarks.picture transitions docs/images/transitions.svg`` runs the demo, on the
simulated accelerator or a GPU, and draws what each transition takes: stock code beside `residency`.
``--from FILE`` takes what ``residency demo --json`` has written before. ``python -m
benchmarks.picture card docs/images/card.svg`` draws the figures of a report of this folder.

Both have a background of their own, light or dark as the reader's system is.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from residency._demo import CASES, Report
from residency._demo._report import report_from
from residency._units import MIB, parse_bytes

REPORT = Path(__file__).parent / "reports" / "2026-11-26_h200_h100.md"
_WIDTH, _MARGIN = 900, 24
_STYLE = """
text { font: 15px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328; }
.title { font-size: 19px; font-weight: 600; } .soft { fill: #59636e; } .strong { font-weight: 600; }
.page { fill: #ffffff; stroke: #d1d9e0; } .over { fill: #b42318; fill-opacity: .07; }
.card { stroke: #b42318; stroke-width: 2; stroke-dasharray: 7 4; } .bad { fill: #b42318; }
.stock { fill: #c2570c; } .ours { fill: #1f6feb; } .other { fill: #8c959f; }
.axis { stroke: #8c959f; } .break, .inside { fill: #ffffff; } .inside { font-weight: 600; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; } .soft { fill: #9198a1; } .page { fill: #151b23; stroke: #3d444d; }
.over { fill: #ff7b72; } .card { stroke: #ff7b72; } .bad { fill: #ff7b72; }
.stock { fill: #e0823d; } .ours { fill: #58a6ff; } .other { fill: #6e7681; }
.break, .inside { fill: #151b23; } }
"""


@dataclass(frozen=True)
class Transition:
    """The bytes that a transition takes, and its capacity.

    Attributes:
        lines: Its name, in lines.
        capacity: The memory that there is.
        stock: What stock code takes where nothing limits it.
        ours: What the same run takes with `residency`.
        is_least: Whether stock code was ended by the capacity in each run, so that it takes more.
    """

    lines: tuple[str, ...]
    capacity: int
    stock: int
    ours: int
    is_least: bool = False


_NAMES = {
    "resume": ("resume", "from a save"),
    "async-save": ("saves in the", "background"),
    "optimizer-step": ("optimizer", "step"),
    "best-adapter": ("reload of the", "best adapter"),
    "evaluation": ("evaluation", "with metrics"),
    "hand-off": ("hand-off to", "an engine"),
}


def transition(report: Report) -> Transition:
    """Returns the figures of a case of the demo."""
    stock, ours = report.stock, report.ours
    capacity = stock.capacity_bytes or 0
    lines = _NAMES[report.case]
    if report.case == "hand-off":  # two processes: what the trainer keeps, and the engine's block
        block = parse_bytes(report.facts["block"].rpartition(" = ")[2])
        flat = next(p.detail for p in report.promises if "does not creep" in p.name)
        kept = parse_bytes(flat.partition(" to ")[2].partition(",")[0])
        return Transition(lines, capacity, report.rows[0].peak_bytes + block, kept + block)
    free = [row.peak_bytes for row in report.rows if row.capacity_bytes is None]
    if max(free) > capacity:
        return Transition(lines, capacity, max(free), ours.peak_bytes)
    asked = stock.peak_bytes + (stock.asked_bytes or 0)
    return Transition(lines, capacity, max(asked, capacity), ours.peak_bytes, is_least=True)


def draw_transitions(transitions: Sequence[Transition], device: str) -> str:
    """Returns the picture of the demo's cases: two columns each, beside one another."""
    top, base, height, most = 108, 390, 500, 2.5  # the last: of the capacity, what is drawn
    group, column = (_WIDTH - 2 * _MARGIN) / len(transitions), 54

    def y(share: float) -> float:
        return base - (base - top) * min(share, most) / most

    parts = [
        _text(_MARGIN, 38, "Memory that each transition takes, of what there is", "title"),
        *_keys((("stock", "stock code"), ("ours", "the same run with residency")), 64),
        f"<rect class='over' x='{_MARGIN}' y='{top - 24}' width='{_WIDTH - 2 * _MARGIN}' "
        f"height='{y(1) - top + 24:.1f}'/>",
        _text(
            _WIDTH - _MARGIN, 64, "the line is the capacity: above it, out of memory", "bad", "end"
        ),
    ]
    for number, each in enumerate(transitions):
        middle = _MARGIN + group * (number + 0.5)
        for name, size, place in (("stock", each.stock, -1), ("ours", each.ours, 1)):
            level, left = y(size / each.capacity), middle + place * 29 - column / 2
            parts.append(
                f"<rect class='{name}' x='{left:.1f}' y='{level:.1f}' width='{column}' "
                f"height='{base - level:.1f}' rx='3'/>"
            )
            if size > most * each.capacity:  # longer than the picture is high
                parts.append(
                    f"<path class='break' d='M{left - 2:.1f} {level + 26:.1f}l58 -12v7l-58 12z'/>"
                )
            if name == "ours":
                parts.append(_text(middle + 29, level + 19, _mib(size), "inside", "middle"))
            else:
                shown = f"&gt; {_mib(each.capacity)}" if each.is_least else _mib(size)
                parts.append(_text(middle - 33, level - 8, shown, "strong", "middle"))
        parts += [
            _text(middle, base + 24 + 19 * line, text, "strong", "middle")
            for line, text in enumerate(each.lines)
        ]
        parts.append(_text(middle, base + 66, f"of {_mib(each.capacity)} MiB", "soft", "middle"))
    parts += [
        f"<line class='card' x1='{_MARGIN}' x2='{_WIDTH - _MARGIN}' y1='{y(1)}' y2='{y(1)}'/>",
        f"<line class='axis' x1='{_MARGIN}' x2='{_WIDTH - _MARGIN}' y1='{base}' y2='{base}'/>",
        _text(
            _MARGIN,
            height - 12,
            f"MiB at the peak; small models, so that it runs anywhere: {device}",
            "soft",
        ),
    ]
    return _svg(height, "What stock code takes at six transitions, and with residency", parts)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.1f}"


@dataclass(frozen=True)
class Panel:
    """A few bars under a title.

    Attributes:
        title: What was measured.
        below: The card, and what the unit is.
        unit: The unit of the figures.
        bars: The class, the label and the figure of each, in the order in which they are shown.
    """

    title: str
    below: str
    unit: str
    bars: tuple[tuple[str, str, float], ...]


def panels(report: str) -> list[Panel]:
    """Returns the panels of a card's report, each figure from the row that it stands in."""

    def figure(row: str, column: int, number: int = 0) -> float:
        lines = [line for line in report.splitlines() if line.startswith(f"| {row}")]
        if len(lines) != 1:
            raise ValueError(f"{len(lines)} rows of the report begin with {row!r}; expected one.")
        cell = lines[0].split("|")[1 + column]
        return float(re.findall(r"\d[\d,]*(?<!,)(?:\.\d+)?", cell)[number].replace(",", ""))

    adamw = "fp32, `offload_optimizer`, foreach"
    return [
        Panel(
            "An AdamW step, its state on the host",
            "1.07 billion fp32 parameters, H200; lower is better",
            "ms",
            (
                ("ours", "residency", figure(adamw, 1)),
                ("other", "moved one by one", figure("a serial swap", 1)),
                ("other", "torchao 0.18", figure("torchao 0.18", 1)),
                ("other", "step on the host", figure("a step on the host", 1)),
                ("other", "nothing offloaded", figure("fp32, stock", 1, -1)),
            ),
        ),
        Panel(
            "A save: how long training stands still",
            "6.66 GiB, H200; lower is better",
            "ms",
            (
                ("ours", "residency", figure("`Checkpointer.save`", 2, -1)),
                ("other", "dcp.async_save", figure("`dcp.async_save`", 3)),
                ("other", ".cpu(), then write", figure("`.cpu()` in the call", 2)),
            ),
        ),
        Panel(
            "A resume: memory reserved in vain",
            "0.6 billion fp32 parameters, H100; lower is better",
            "MiB",
            (
                ("ours", "residency", figure("`TrainState`", 1)),
                ("other", "set_state_dict", figure("`get_state_dict`", 1)),
            ),
        ),
        Panel(
            "Moving 4 GiB off the card",
            "after the first time, H200; higher is better",
            "GB/s",
            (
                ("ours", "residency.park", figure("after that", 1)),
                ("other", ".cpu()", figure("`.cpu()`, `.to(device)`", 1)),
            ),
        ),
    ]


def draw_card(found: Sequence[Panel], below: str) -> str:
    """Returns the picture of a card's figures: two panels a row."""
    wide = (_WIDTH - 3 * _MARGIN) / 2
    parts = [_text(_MARGIN, 38, "Measured on one H200 and one H100", "title")]
    parts += _keys((("ours", "residency"), ("other", "others")), 64)
    upper = 84.0
    for first in range(0, len(found), 2):
        row = found[first : first + 2]
        for number, panel in enumerate(row):
            parts += _bars(panel, _MARGIN + number * (wide + _MARGIN), upper, wide)
        upper += 66 + 28 * max(len(panel.bars) for panel in row)
    parts.append(_text(_MARGIN, upper + 14, below, "soft"))
    return _svg(round(upper + 32), "Figures of an H200 and an H100, residency beside others", parts)


def _bars(panel: Panel, left: float, upper: float, wide: float) -> Iterator[str]:
    yield _text(left, upper + 20, panel.title, "strong")
    yield _text(left, upper + 40, panel.below, "soft")
    begin, most = left + 150, max(size for _, _, size in panel.bars)
    for number, (name, label, size) in enumerate(panel.bars):
        line = upper + 66 + 28 * number
        width = max(2, (wide - 150 - 90) * size / most)
        yield _text(begin - 8, line, label, "strong" if name == "ours" else "soft", "end")
        yield (
            f"<rect class='{name}' x='{begin:.1f}' y='{line - 15:.1f}' width='{width:.1f}' "
            "height='20' rx='3'/>"
        )
        yield _text(begin + width + 7, line, f"{size:,g} {panel.unit}", "strong")


def _keys(keys: Sequence[tuple[str, str]], y: int) -> Iterator[str]:
    left = _MARGIN
    for name, label in keys:
        yield f"<rect class='{name}' x='{left}' y='{y - 12}' width='14' height='14' rx='3'/>"
        yield _text(left + 20, y, label)
        left += 44 + 8 * len(label)


def _text(x: float, y: float, text: str, name: str = "", anchor: str = "start") -> str:
    text = text if "&gt;" in text else escape(text)
    return f"<text class='{name}' x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'>{text}</text>"


def _svg(height: int, title: str, parts: Sequence[str]) -> str:
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {height}' role='img'>",
            f"<title>{escape(title)}</title><style>{_STYLE}</style>",
            f"<rect class='page' x='.5' y='.5' rx='10' width='{_WIDTH - 1}' "
            f"height='{height - 1}'/>",
            *parts,
            "</svg>\n",
        ]
    )


def _demo(before: Path | None) -> dict[str, Any]:
    """Returns what the demo wrote as JSON, now or before."""
    if before is None:
        command = [sys.executable, "-m", "residency", "demo", "--json"]
        text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    else:
        text = before.read_text()
    found: dict[str, Any] = json.loads(text)
    return found


def transitions_picture(before: Path | None) -> str:
    """Returns the picture of the transitions, of a demo that is run now or was run before."""
    reports = {each["case"]: report_from(each) for each in _demo(before)["reports"]}
    device = next(iter(reports.values())).device.partition(" (")[0]
    return draw_transitions([transition(reports[name]) for name in CASES], device)


def card_picture(before: Path | None) -> str:
    """Returns the picture of a card's report."""
    report = before or REPORT
    name = f"benchmarks/reports/{report.name}"
    return draw_card(panels(report.read_text()), f"torch 2.11.0+cu130; every figure: {name}")


_PICTURES: dict[str, Callable[[Path | None], str]] = {
    "transitions": transitions_picture,
    "card": card_picture,
}


def main() -> int:
    """Draws one picture; returns 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("picture", choices=_PICTURES)
    parser.add_argument("path", type=Path, metavar="FILE.svg")
    parser.add_argument("--from", type=Path, dest="before", metavar="FILE", help="data of before")
    arguments = parser.parse_args()
    arguments.path.parent.mkdir(parents=True, exist_ok=True)
    arguments.path.write_text(_PICTURES[arguments.picture](arguments.before))
    return 0


if __name__ == "__main__":
    sys.exit(main())
