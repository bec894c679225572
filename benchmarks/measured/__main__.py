"""Holds dry runs of this repository's scripts against the peaks that they had on a card.

``python -m benchmarks.measured`` makes all runs of ``h200.json``, one after another, in a quarter
of an hour; numbers choose among them: ``python -m benchmarks.measured 5 10``. The answer is for the
torch that runs it, so that only a run with the card's own torch is a judge of the dry run.

The report is ``reports/YYYY-MM-DD_simulated_measured_h200.md``, written anew after each run.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.__main__ import report_heading, report_path

ROOT = Path(__file__).resolve().parents[2]
CARD = "h200"
PEAKS = Path(__file__).with_name(f"{CARD}.json")
GIB = 1 << 30
Predicted = tuple[tuple[int, int], tuple[int, int]]
TABLE = (
    "| n | script | GiB allocated | predicted | error | GiB reserved | predicted | error |",
    "|---:|---|---:|---:|---:|---:|---:|---:|",
)


@dataclass(frozen=True)
class Run:
    """A run on the card.

    Attributes:
        n: Its number.
        command: The script with its arguments, from the repository's folder.
        allocated: Bytes, as ``torch.cuda.max_memory_allocated`` had them at the end.
        reserved: Bytes, as ``torch.cuda.max_memory_reserved`` had them.
    """

    n: int
    command: str
    allocated: int
    reserved: int

    @property
    def title(self) -> str:
        """The command without the folder of its output."""
        return re.sub(r" --(out-dir|output-dir|output) \S+", "", self.command)


def runs() -> list[Run]:
    """Returns the runs that were measured."""
    found = json.loads(PEAKS.read_text())["runs"]
    return [
        Run(each["n"], each["command"], each["peak_allocated_bytes"], each["peak_reserved_bytes"])
        for each in found
    ]


def row(run: Run, predicted: Predicted | None) -> str:
    """Returns the row of a run.

    Args:
        run: The run.
        predicted: Bytes allocated and reserved at the peak of its dry run, each what it needs and
            the most that cuDNN makes of it; None, it failed.
    """
    cells = []
    for measured, found in zip(
        (run.allocated, run.reserved), predicted or (None, None), strict=True
    ):
        said, error = "the script failed", ""
        if found is not None:
            need, most = found
            said = f"{need / GIB:.3f}" + f" to {most / GIB:.3f}" * (most > need)
            nearest = min(max(measured, need), most)
            is_inside = need <= measured <= most > need
            error = "inside" if is_inside else f"{100 * (nearest / measured - 1):+.2f} %"
        cells += [f"{measured / GIB:.3f}", said, error]
    return f"| {run.n} | `{run.title}` | " + " | ".join(cells) + " |"


def main(arguments: Sequence[str]) -> int:
    """Prints a row of the report for each run; returns 0 when all ran.

    Args:
        arguments: The numbers of the runs that are made; none, of all.
    """
    has_failed = False
    for run in runs():
        if arguments and str(run.n) not in arguments:
            continue
        found = _predicted(run)
        print(row(run, found), flush=True)
        has_failed |= found is None
        if found is not None:
            _report(run, found)
    return 1 if has_failed else 0


def _predicted(run: Run) -> Predicted | None:
    """Makes a dry run; returns None if it failed."""
    words = [str(ROOT / word) if (ROOT / word).is_file() else word for word in run.command.split()]
    command = [sys.executable, "-m", "residency", "dry-run", "--device", CARD, "--steps", "0"]
    with tempfile.TemporaryDirectory(prefix="residency-measured-") as folder:
        Path(folder, "out").mkdir()  # the scripts make files in it
        done = subprocess.run(
            [*command, "--json", "--", sys.executable, *words],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    answer: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}
    if not answer.get("is_complete"):
        print(answer.get("error") or done.stderr[-4000:], file=sys.stderr)
        return None
    most = answer["workspaces"] or {}
    allocated, reserved = (
        (answer[key], max(answer[key], most.get(key, 0)))
        for key in ("peak_allocated_bytes", "peak_reserved_bytes")
    )
    return allocated, reserved


def _report(run: Run, predicted: Predicted) -> None:
    """Writes today's report anew, with a row more or in the place of an older one."""
    path = report_path(f"measured_{CARD}", ".md", "simulated")
    rows = {}
    for line in [*(path.read_text().splitlines() if path.exists() else ()), row(run, predicted)]:
        if found := re.match(r"\| (\d+) \|", line):
            rows[int(found[1])] = line
    card = json.loads(PEAKS.read_text())
    heading = report_heading("measured", "simulated", "python -m benchmarks.measured")
    note = (
        f"Measured on an {card['gpu']}, torch {card['torch']}, {card['measured']}. Predicted with "
        f"torch {torch.__version__}."
    )
    lines = [*TABLE, *(rows[number] for number in sorted(rows))]
    path.write_text(f"{heading}\n{note}\n\n" + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
