"""Draws the demo's cases: the device's memory over each run, stock code beside `residency`.

``python -m benchmarks.picture docs/images/transitions.svg`` runs the cases, each in a process of
its own, on the simulated accelerator or a GPU. A thread reads the bytes that are allocated while
they run, every millisecond. Of the case of two processes the figure is what the trainer has
reserved when the engine asks for its block, and the line is what that block leaves of the capacity.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from residency._demo import CASES, Settings, _hand_off, run_case
from residency._demo._child import Child
from residency._units import MIB

_HAND_OFF = "hand-off"
_COLUMNS = 3
_MOST_POINTS = 300  # of a curve: the picture is kept in the repository
_SECONDS_BETWEEN = 0.001
_STOCK, _OURS = "#c0392b", "#2471a3"

Curves = dict[str, list[tuple[float, int]]]  # by the label of a run: seconds, bytes


class Curve(threading.Thread):
    """A thread that reads the bytes allocated on the device, run by run."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.curves: Curves = {}
        self._label: str | None = None
        self._began = 0.0
        self._is_over = threading.Event()

    def show(self, label: str, *_: object) -> None:
        """Begins a curve with each new label; what the demo calls to show how far it is."""
        if label not in self.curves:
            self._began = time.perf_counter()
            self.curves[label] = []
        self._label = label

    def run(self) -> None:
        while not self._is_over.wait(_SECONDS_BETWEEN):
            if self._label is not None:
                seconds = time.perf_counter() - self._began
                self.curves[self._label].append((seconds, torch.accelerator.memory_allocated()))

    def stop(self) -> None:
        """Ends the thread."""
        self._is_over.set()
        self.join()


@contextmanager
def watched_processes(curve: Curve) -> Iterator[list[int]]:
    """Notes what the trainer has reserved when the engine asks for its block, step by step.

    Yields:
        Where the sizes of the blocks go that the engine asks for.
    """
    blocks: list[int] = []

    def points() -> list[tuple[float, int]]:
        return curve.curves[list(curve.curves)[-1]]

    class Watched(Child):
        def ask(self, **message: Any) -> dict[str, Any]:
            if message["order"] == "allocate":
                blocks.append(message["num_bytes"])
            answer = super().ask(**message)
            if message["order"] == "step":
                points().append((len(points()) + 1, answer["reserved"]))
            return answer

        def receive(self) -> dict[str, Any]:
            answer = super().receive()
            if "inside" in answer:  # while it hands over, not after its step
                points()[-1] = (len(points()), answer["inside"]["reserved"])
            return answer

    vars(_hand_off)["Child"] = Watched
    try:
        yield blocks
    finally:
        vars(_hand_off)["Child"] = Child


def sample(name: str) -> dict[str, Any]:
    """Runs one case; returns its limit, and the curves of stock code and of ours under it."""
    curve = Curve()
    if name == _HAND_OFF:
        with watched_processes(curve) as blocks:
            report = run_case(name, Settings(), curve.show)
        limit = (report.stock.capacity_bytes or 0) - blocks[0]
    else:
        curve.start()
        report = run_case(name, Settings(), curve.show)
        curve.stop()
        limit = report.stock.capacity_bytes or 0
    runs = [
        {**asdict(row), "points": curve.curves[row.setting]} for row in (report.stock, report.ours)
    ]
    return {"limit": limit, "runs": runs, "held": report.is_held()}


def shown(points: Sequence[tuple[float, int]], share: float) -> list[tuple[float, int]]:
    """Returns few points: of each stretch the one with the most bytes, up to the last that reaches
    this share of the most. After it the run has ended, and its memory goes back.
    """
    least = share * max(size for _, size in points)
    last = max(at for at, (_, size) in enumerate(points) if size >= least)
    stretch = max(1, last // _MOST_POINTS)
    parts = [points[at : min(at + stretch, last + 1)] for at in range(0, last + 1, stretch)]
    return [max(part, key=lambda point: point[1]) for part in parts]


def draw(path: Path, samples: dict[str, dict[str, Any]]) -> None:
    """Writes a panel for each case."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    num_rows = -(-len(samples) // _COLUMNS)
    figure = Figure(figsize=(4 * _COLUMNS, 2.8 * num_rows + 0.6), layout="constrained")
    for index, (name, case) in enumerate(samples.items()):
        axes = figure.add_subplot(num_rows, _COLUMNS, index + 1)
        is_of_steps = name == _HAND_OFF
        axes.axhline(case["limit"] / MIB, color="black", linewidth=1, linestyle="--")
        for run, color in zip(case["runs"], (_STOCK, _OURS), strict=True):
            has_failed = run["outcome"] != "finished"
            points = (
                run["points"] if is_of_steps else shown(run["points"], 0.9 if has_failed else 0.55)
            )
            places, sizes = zip(*points, strict=True)
            axes.plot(places, [size / MIB for size in sizes], color=color)
            if has_failed:
                axes.plot(places[-1], case["limit"] / MIB, "X", color=color, markersize=11)
        axes.set_title(name)
        axes.set_xlabel("step" if is_of_steps else "seconds")
        axes.set_ylabel("MiB reserved when the engine asks" if is_of_steps else "MiB allocated")
        axes.set_ylim(0, case["limit"] / MIB * 1.1)
    marks = [
        Line2D([], [], color=_STOCK, label="stock"),
        Line2D([], [], color=_STOCK, marker="X", linestyle="", label="out of memory"),
        Line2D([], [], color=_OURS, label="with residency"),
        Line2D(
            [], [], color="black", linestyle="--", label="capacity (hand-off: less the engine's)"
        ),
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=len(marks), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    """Runs the cases and draws them; returns 0 when every promise held."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("path", type=Path, metavar="FILE.svg")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)  # one, as JSON
    arguments = parser.parse_args()
    if arguments.case:
        arguments.path.write_text(json.dumps(sample(arguments.case)))
        return 0
    importlib.import_module("matplotlib")  # missing, it is named before the minutes of the cases
    samples = {}
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            found = Path(folder, "case.json")
            command = [sys.executable, "-m", "benchmarks.picture", str(found), "--case", name]
            subprocess.run(command, check=True)
            samples[name] = json.loads(found.read_text())
        print(f"{name}: {'held' if samples[name]['held'] else 'BROKEN'}", flush=True)
    draw(arguments.path, samples)
    return 0 if all(case["held"] for case in samples.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
