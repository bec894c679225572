"""The atlas: a dry run's rows beside a card's, kind by kind, and how they are compared."""

from __future__ import annotations

import importlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import workers

pytestmark = pytest.mark.sim

ROOT = Path(__file__).parents[2]
_TENTH = random.Random(os.environ.get("TORTURE_FROM") or "").randrange(10)
_DID_WHAT_IT_SHOULD = (0, 3)  # a dry run of a program that takes no optimizer step has the second


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The list of kinds, a module of the benchmarks beside the tests."""
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.atlas.kinds")


@pytest.fixture
def compare(kinds: Any) -> Any:
    """The module that compares rows."""
    return importlib.import_module("benchmarks.atlas.compare")


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.parametrize("parts", [["attention", "shapes"], [f"opinfo:{_TENTH}/10"]])
def test_every_kind_of_rows_is_as_near_to_a_cards_as_is_held(
    kinds: Any, compare: Any, parts: list[str]
) -> None:
    command = [sys.executable, "-m", "residency", "dry-run", "--device", "h100", "--steps", "0"]
    command += ["--", sys.executable, "-m", "benchmarks.atlas", "rows", *parts]
    done = subprocess.run(
        command, cwd=ROOT, env=workers.environment(ROOT), capture_output=True, text=True
    )
    assert done.returncode in _DID_WHAT_IT_SHOULD, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"op"')]
    dry = compare.by_case(map(json.loads, lines))
    assert [row for row in dry.values() if "CUDA error" in row.get("error", "")] == []
    card = compare.load(kinds.CARD)
    assert kinds.faults(kinds.read(), card, dry, torch.__version__) == []


def test_every_line_of_the_list_is_a_kind_of_the_cards_and_has_its_reason(
    kinds: Any, compare: Any
) -> None:
    rows = compare.load(kinds.CARD).values()
    listed = kinds.read()
    known = {compare.kind_of(row) for row in rows} | {compare.group_of(row) for row in rows}
    assert listed.keys() <= known
    assert [kind for kind, entry in listed.items() if len(entry.reason) < 5] == []


def _rows(**figures: list[Any]) -> list[dict[str, Any]]:
    return [{"op": op, "fw": found, "bw": None, "shape": [1]} for op, found in figures.items()]


def test_too_much_and_too_little_are_said_of_a_kind(kinds: Any, compare: Any) -> None:
    card = compare.by_case(_rows(a=[1, 64, 64, 64, []], b=[1, 64, 64, 64, []], c=[1, 8, 8, 8, []]))
    dry = compare.by_case(_rows(a=[1, 64, 1088, 64, []], b=[1, 64, 64, 64, []], c=[1, 8, 9, 8, []]))
    listed = {"shapes/b": kinds.Held("apart"), "shapes/c": kinds.Held("1 KiB")}
    assert kinds.faults(listed, card, dry, "2.11.0") == [
        "shapes/a: held is exact, and it is 1 KiB",
        "shapes/b: it is exact by now; the list says apart",
    ]
    listed = {"shapes/a": kinds.Held("exact", "2.11"), "shapes/c": kinds.Held("apart", "2.11")}
    assert kinds.faults(listed, card, dry, "2.13.0+cpu") == []


def test_an_order_of_large_requests_that_was_right_stays_right(kinds: Any, compare: Any) -> None:
    big = 1 << 20
    card = compare.by_case(_rows(a=[2, 2 * big, big, 0, [big, -big, big]]))
    dry = compare.by_case(_rows(a=[2, 2 * big, big, 0, [big, big, -big]]))
    listed = {"shapes": kinds.Held("1", reason="rows in order")}
    assert kinds.faults(listed, card, card, "2.11.0") == []
    assert kinds.faults(listed, card, dry, "2.11.0") == [
        "shapes: 1 rows had their large requests in order, and 0 have"
    ]


def test_a_table_counts_rows_by_kind(compare: Any) -> None:
    card = compare.by_case(_rows(a=[1, 64, 64, 64, [1 << 16]], b=[1, 64, 64, 64, []]))
    dry = compare.by_case(_rows(a=[2, 65, 64, 64, [1 << 16]], b=[1, 64, 64, 2064, []]))
    counts = [line.split()[1:] for line in compare.table(card, dry)[2:]]
    assert counts == [
        ["2", "1", "0", "1", "1", "of", "1"],
        ["1", "1", "0", "1", "1", "of", "1"],
        ["1", "0", "0", "0", "0", "of", "0"],
    ]


def test_a_row_has_the_requests_of_both_passes(kinds: Any, tmp_path: Path, built: None) -> None:
    script = tmp_path / "rows.py"
    script.write_text(
        "import sys\nfrom residency import sim\nsim.enable('1GiB', device='cuda')\n"
        "from benchmarks.atlas.rows import Atlas, tensor\n"
        "x = tensor(512, 512)\nAtlas(sys.stdout).row('double', lambda: x * 2, [x], shape=[512])\n"
    )
    (written,) = workers.finish(workers.start(script, folder=ROOT))
    size = 512 * 512 * 4
    assert json.loads(written.splitlines()[-1]) == {
        "op": "double",
        "fw": [1, size, size, size, [size]],
        "bw": [1, size, size, size, [size]],
        "shape": [512],
    }
