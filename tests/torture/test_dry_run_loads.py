"""Random loads of checkpoints under ``residency dry-run``, judged by stock torch and arithmetic.

Each seed is a script of its own (``dry_run_load_scripts.py``). It must write what the same script
writes on the CPU with the numbers of rounds that the documentation promises, hold on the device
what its modules, gradients and optimizer take, and have the phases of what it does.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.torture.dry_run_load_scripts import LINE, SPLIT, Script
from tests.torture.dry_run_loops import marks, printed
from tests.torture.dry_run_packages import Package
from tests.torture.test_dry_run_loops import answer_of, difference

Judge = Callable[[random.Random], None]
Torture = Callable[[Judge], None]

WORKSPACE = 8_519_680  # of cuBLAS, for each thread and stream


def check_held(folder: Path, script: Script, shown: str) -> None:
    """Holds what the script had on the device each time that it asked against arithmetic."""
    lines = (folder / "held.txt").read_text().splitlines()
    (folder / "held.txt").unlink()
    assert len(lines) == len(script.held), shown
    for at, (line, (least, most)) in enumerate(zip(lines, script.held, strict=True)):
        rest = int(line) - least
        workspaces = rest // WORKSPACE
        assert 0 <= workspaces <= 3, (at, line, script.held, shown)
        assert rest - workspaces * WORKSPACE <= most - least, (at, line, script.held, rest, shown)


def check_phases(answer: dict[str, Any], script: Script, shown: str) -> None:
    """Holds the phases that there are, and who holds how much in them."""
    phases = {each["name"]: each["at_peak_bytes"] for each in answer["phases"]}
    assert {"forward", "backward", "optimizer step", "save", "load"} <= set(phases), shown
    counted, blocks = script.bytes, script.bytes.slack * 8 + LINE * 8
    step = phases["optimizer step"]
    is_wrapped = script.wrapper == "DDP"
    buckets = (counted.trained + 2 * SPLIT) * is_wrapped
    assert script.modules <= step["parameters"] <= script.modules + blocks, (step, shown)
    assert counted.trained <= step["gradients"] <= counted.trained + blocks + buckets, (step, shown)
    state = script.states * counted.trained + LINE * counted.count
    for name, held in phases.items():
        copies = 1 if name in ("forward", "backward", "optimizer step") else 2  # as it is loaded
        assert held["optimizer state"] <= copies * (state + blocks), (name, held, shown)
        assert held["gathered parameters"] == 0, (name, held, shown)
        assert held["parameters"] <= script.modules + counted.model + blocks, (name, held, shown)
    least = script.modules + max(least for least, _ in script.held) - script.modules
    peak = answer["peak_allocated_bytes"]
    load = sum(phases["load"].values())
    assert peak >= least + WORKSPACE, (peak, least, shown)
    assert load >= script.bytes.model + script.loaded, (load, script.loaded, shown)
    most = script.modules + counted.model + counted.trained * (2 + 3) + 2 * state + buckets
    most += 2 * script.loaded + 3 * counted.model + 3 * blocks + 4 * WORKSPACE + 2 * SPLIT
    assert peak <= most, (peak, most, shown)


def judge_loads(chance: random.Random, path: Path) -> None:
    """Runs a script in a dry run, and on the CPU with as many rounds as the documentation says."""
    script = Script(chance)
    stock, dry = path / "stock", path / "dry"
    stock.mkdir(parents=True)
    dry.mkdir()
    expected = printed(script.text(full=False).replace("BACKEND", "gloo"), stock)
    (dry / "train.py").write_text(script.text(full=True).replace("BACKEND", "nccl"))
    answer, shown = answer_of(dry, script.steps, "train.py")
    written = marks(dry)
    differs = difference(written, expected)
    assert not differs, f"{differs}: ended is {answer['ended']}: {shown}"
    assert (answer["ended"], answer["error"]) == ("finished", None), shown
    assert (answer["fits"], answer["is_complete"], answer["is_cut"]) == (True, True, True), shown
    assert answer["steps"] == sum(each.startswith("step") for each in written), shown
    check_held(dry, script, shown)
    check_phases(answer, script, shown)
    left = {each.name for each in dry.iterdir()} - {"__pycache__", "rendezvous"}
    assert left == {"train.py"}, left


@pytest.mark.whole
def test_a_load_begins_a_training_where_it_reaches_what_is_trained(
    torture: Torture, tmp_path: Path
) -> None:
    def judge(chance: random.Random) -> None:
        judge_loads(chance, tmp_path / str(len(list(tmp_path.iterdir()))))

    torture(judge)


def judge_packages(chance: random.Random, path: Path) -> None:
    """Runs a script whose loop is an installed package's, and the same with data that ends."""
    package = Package(chance, f"trainkit{chance.randrange(10**9)}")
    stock, dry = path / "stock", path / "dry"
    stock.mkdir(parents=True)
    dry.mkdir()
    package.install(path / "stock-site", "")
    for each in (path / "stock-site").rglob("*.py"):  # as the script is changed, too
        text = each.read_text().replace(".cuda()", "").replace('"cuda"', '"cpu"')
        each.write_text(text.replace(".item()", ".item() * 0 + 1.0"))
    sys.path.insert(0, str(path / "stock-site"))
    try:
        expected = printed(package.text(full=False), stock)
    finally:
        sys.path.pop(0)
        for name in [each for each in sys.modules if each.split(".")[0] == package.name]:
            del sys.modules[name]
    package.install(path / "site", package.text(full=True))
    (dry / "train.py").write_text(package.text(full=True))
    command = ("-m", f"{package.name}.cli") if package.as_command else ("train.py",)
    answer, shown = answer_of(dry, package.steps, *command, path=str(path / "site"))
    written = marks(dry)
    differs = difference(written, expected)
    assert not differs, f"{package.shape}: {differs}: ended is {answer['ended']}: {shown}"
    assert (answer["ended"], answer["error"]) == ("finished", None), shown
    assert (answer["fits"], answer["is_complete"], answer["is_cut"]) == (True, True, True), shown
    assert answer["steps"] == sum(bool(re.match("step ", each)) for each in written), shown


@pytest.mark.whole
def test_the_loop_of_an_installed_trainer_ends(torture: Torture, tmp_path: Path) -> None:
    def judge(chance: random.Random) -> None:
        judge_packages(chance, tmp_path / str(len(list(tmp_path.iterdir()))))

    torture(judge)
