"""Random loops under ``residency dry-run``, judged by the same scripts with data that ends.

Each seed is a script of its own (``dry_run_loops.py``). The documentation says that a training ends
after ``--steps`` optimizer steps as if its data had, that the round of each loop that is under way
goes on to its end, and that the script then goes on as it is written. So it must write what it
writes on the CPU, without residency, where its data does end there.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.torture.dry_run_loop_trainings import FREE
from tests.torture.dry_run_loops import Script, kinds, marks, printed

Judge = Callable[[random.Random], None]
Torture = Callable[[Judge], None]

LONGEST = 240  # seconds: a run takes about three, and this machine may be busy


def answer_of(folder: Path, steps: int, *command: str, path: str = "") -> tuple[Any, str]:
    """Runs Python in a folder in a dry run and returns the JSON, and what to print of a failure."""
    number = () if steps == 2 else ("--steps", str(steps))
    words = ["dry-run", "--json", "--capacity", "24GiB", *number, "--", "python", *command]
    set_for_it = {"CUDA_VISIBLE_DEVICES": ""}
    if path:
        set_for_it["PYTHONPATH"] = os.pathsep.join([path, os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-m", "residency", *words],
        cwd=folder, env=os.environ | set_for_it, capture_output=True, text=True, check=False,
        timeout=LONGEST,
    )  # fmt: skip
    shown = f"{folder}\n{ended.stderr[-4000:]}"
    assert ended.returncode == 0, f"status {ended.returncode}: {shown}"
    return json.loads(ended.stdout), shown


def dry_run(script: Script, folder: Path) -> tuple[Any, str]:
    """Runs a script in a folder and returns the JSON, and what to print of a failure."""
    place = folder / "training" if script.as_module else folder
    place.mkdir(exist_ok=True)
    (place / "train.py").write_text(script.text(full=True))
    command = ["-m", "training.train"] if script.as_module else ["train.py"]
    return answer_of(folder, script.steps, *command)


def difference(written: list[str], expected: list[str]) -> str:
    """Returns where two lists of marks part, with the last that they share; empty where nowhere."""
    if written == expected:
        return ""
    pairs = zip([*written, "the end"], [*expected, "the end"], strict=False)
    at = next(i for i, (own, of_stock) in enumerate(pairs) if own != of_stock)
    shared = " / ".join(written[max(at - 4, 0) : at])
    own, of_stock = (" / ".join([*each, "the end"][at : at + 4]) for each in (written, expected))
    return f"after {shared!r} came {own!r}, not {of_stock!r}"


def check_steps(answer: dict[str, Any], script: Script, written: list[str]) -> None:
    """Holds the number of steps against those that the script counted itself."""
    names = [each.name for each in script.trainings]
    of = {name: [each for each in written if each.startswith(f"{name} step ")] for name in names}
    made = sum(len(each) for each in of.values())
    for name, steps in of.items():
        assert steps, f"no step of training {name}"
    first = script.trainings[0]
    assert answer["has_no_optimizer"] == (first.kind == "by hand")
    if script.more == "" and first.frame == "optimizers":  # each epoch is a training
        assert answer["steps"] == made
    elif script.more == "" and first.critics == 1:
        assert answer["steps"] == script.steps
        assert made == script.steps + FREE * (first.kind == "by hand")
    assert answer["steps"] >= script.steps
    phases = {each["name"] for each in answer["phases"]}
    assert phases >= {"forward", "backward"}
    # A hook makes its steps within the backward pass.
    has_step = any(each.endswith("optimizer step") for each in phases)
    assert has_step == (first.kind != "by hand")


def judge_loops(chance: random.Random, path: Path) -> None:
    """Runs a script in a dry run, and with data that ends after as many steps."""
    script = Script(chance)
    stock, dry = path / "stock", path / "dry"
    stock.mkdir(parents=True)
    dry.mkdir()
    expected = printed(script.text(full=False), stock)
    whole = printed(script.text(full=True), stock)
    answer, shown = dry_run(script, dry)
    written = marks(dry)
    differs = difference(kinds(written, script.lenient), kinds(expected, script.lenient))
    assert not differs, f"{differs}: ended is {answer['ended']}: {shown}"
    assert (answer["ended"], answer["error"]) == ("finished", None), shown
    assert (answer["fits"], answer["is_complete"]) == (True, True), shown
    assert answer["is_cut"] == (whole != expected), shown
    check_steps(answer, script, written)
    left = {each.name for each in dry.iterdir()} - {"__pycache__"}
    assert left == {"training" if script.as_module else "train.py"}, left


@pytest.mark.whole
def test_a_script_writes_what_it_writes_where_its_data_ends(
    torture: Torture, tmp_path: Path
) -> None:
    def judge(chance: random.Random) -> None:
        judge_loops(chance, tmp_path / str(len(list(tmp_path.iterdir()))))

    torture(judge)
