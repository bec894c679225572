"""``python -m benchmarks.measured``: its rows, and the table of the docs.

The runs themselves take a quarter of an hour.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
CONVOLUTIONS = {12, 14, 15}  # have two figures: what they need, and what cuDNN may take beside it
NEEDS_MORE = {14}  # than the card took, and the page says why
PAGE = ROOT / "docs" / "explanation" / "accuracy.md"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.measured.__main__")


def test_a_row_has_what_a_card_showed_and_how_far_the_dry_run_was_from_it(measured: Any) -> None:
    run = measured.Run(3, "a.py --output out/a.pt --steps 2", 4 << 30, 5 << 30)
    start = "| 3 | `a.py --steps 2` | 4.000 | "
    assert measured.row(run, ((4 << 30, 4 << 30), (6 << 30, 6 << 30))) == (
        f"{start}4.000 | +0.00 % | 5.000 | 6.000 | +20.00 % |"
    )
    assert measured.row(run, ((2 << 30, 8 << 30), (6 << 30, 7 << 30))) == (
        f"{start}2.000 to 8.000 | inside | 5.000 | 6.000 to 7.000 | +20.00 % |"
    )
    assert measured.row(run, None) == (
        f"{start}the script failed |  | 5.000 | the script failed |  |"
    )


def test_every_measured_script_is_there(measured: Any) -> None:
    runs = measured.runs()
    assert [run.n for run in runs] == list(range(1, 19))
    assert all((ROOT / run.command.split()[0]).is_file() for run in runs)


def test_the_docs_have_the_rows_of_the_newest_report(measured: Any) -> None:
    report = max((ROOT / "benchmarks" / "reports").glob("*_simulated_measured_h200.md"))
    rows = [re.findall(r"^\| \d+ \|.*$", text.read_text(), re.M) for text in (report, PAGE)]
    assert rows[0] == rows[1]
    titles = {str(run.n): run.title for run in measured.runs()}
    far, ranges = set(), set()
    for row in rows[0]:
        number, title, *_ = row.strip("| ").split(" | ")
        assert title == f"`{titles[number]}`"
        cells = row.strip("| ").split(" | ")
        for error, most in ((cells[4], 0.5), (cells[7], 2)):
            if error == "inside":
                ranges.add(int(number))
            elif abs(float(error.removesuffix(" %"))) > most:
                far.add(int(number))
    assert ranges <= CONVOLUTIONS
    assert far <= NEEDS_MORE
