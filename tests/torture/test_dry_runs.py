"""Random training scripts under ``residency dry-run``, judged by torch's figures and arithmetic.

Each seed is a script of its own (``dry_run_scripts.py``). Its answer is held against what shapes
say, against what the script itself reads from ``torch.cuda``, with bytes and without, and against
runs on devices that hold exactly as much, and too little.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.torture.dry_run_scripts import LINE, SPLIT, Script, rounded
from tests.torture.dry_run_searches import Plain, Ranked

Judge = Callable[[random.Random], None]
Torture = Callable[[Judge], None]

AMPLE = 24 << 30
SEGMENT = 2 << 20  # what torch's allocator asks the device for, at least
WORKSPACE = 8_519_680  # of cuBLAS, for each thread and stream
OWNERS = [
    "parameters",
    "gradients",
    "optimizer state",
    "gathered parameters",
    "activations",
    "other",
]
NUMBERS = [
    *("capacity_bytes", "context_bytes", "needed_bytes", "headroom_bytes", "saved_bytes"),
    *("peak_allocated_bytes", "peak_reserved_bytes", "host_peak_bytes", "pinned_peak_bytes"),
    *("files", "steps", "retries", "status"),
]
TRUTHS = ["fits", "is_complete", "is_cut", "has_compiled", "was_interrupted", "is_real"]
PASSING = {"seconds", "host_peak_bytes"}  # of this run alone, and "about"
ENDS = {"finished", "left", "stopped", "error", "running"}
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG")


class Folder:
    """A script in a folder with files of the user's own, which no run may touch."""

    def __init__(self, folder: Path, text: str) -> None:
        self.path = folder
        self.script = folder / "train.py"
        self.script.write_text(text)
        (folder / "data.bin").write_bytes(bytes(range(256)) * 64)
        self._before = {"train.py": self.script.read_bytes()}
        self._before["data.bin"] = (folder / "data.bin").read_bytes()

    def dry_run(self, *options: str, status: int, of_script: tuple[str, ...] = ()) -> Any:
        """Runs the command and returns its JSON."""
        command = ["residency", "dry-run", "--json", "--quiet", *options, "--"]
        command = [sys.executable, "-m", *command, "python", "train.py", *of_script]
        hidden = {"CUDA_VISIBLE_DEVICES": ""}
        environment = {k: v for k, v in os.environ.items() if k not in VARIABLES} | hidden
        ended = subprocess.run(
            command, cwd=self.path, env=environment, capture_output=True, text=True, check=False
        )
        where = f"{' '.join(options)} {self.path}\n{ended.stdout[-2000:]}\n{ended.stderr[-6000:]}"
        assert ended.returncode == status, f"status {ended.returncode}, not {status}: {where}"
        for name, content in self._before.items():
            assert (self.path / name).read_bytes() == content, f"{name} was changed: {where}"
        more = {each.name for each in self.path.iterdir()} - set(self._before)
        assert more <= {"record.jsonl", "last.pt"}, f"files that no script made: {more}"
        return json.loads(ended.stdout)

    def records(self) -> list[dict[str, Any]]:
        """Returns what the script recorded since the last call, a record a process."""
        file = self.path / "record.jsonl"
        lines = file.read_text().splitlines()
        file.unlink()
        return [json.loads(each) for each in lines]


def check_schema(answer: dict[str, Any]) -> None:
    """Holds an answer against the table of keys, and its figures against each other."""
    assert answer["schema"] == 2
    for key in NUMBERS:
        assert type(answer[key]) is int, (key, answer[key])
        assert answer[key] >= 0 or key == "headroom_bytes", (key, answer[key])
    for key in TRUTHS:
        assert type(answer[key]) is bool, (key, answer[key])
    assert answer["ended"] in ENDS
    assert answer["needed_bytes"] == answer["peak_reserved_bytes"] + answer["context_bytes"]
    assert answer["headroom_bytes"] == answer["capacity_bytes"] - answer["needed_bytes"]
    phases = answer["phases"]
    for key in ("peak_allocated_bytes", "peak_reserved_bytes"):
        assert max(each[key] for each in phases) == answer[key], key
    for phase in phases:
        held = phase["at_peak_bytes"]
        assert sorted(held) == sorted(OWNERS), phase
        assert min(held.values()) >= 0, phase
        assert sum(held.values()) == phase["peak_allocated_bytes"] <= phase["peak_reserved_bytes"]
        free = answer["capacity_bytes"] - answer["context_bytes"]
        assert phase["headroom_bytes"] == free - phase["peak_reserved_bytes"], phase
        assert phase["peak_reserved_bytes"] % SEGMENT == 0
        assert phase["peak_allocated_bytes"] % LINE == 0
    assert len({each["name"] for each in phases}) == len(phases)


def check_owners(answer: dict[str, Any], script: Script) -> None:
    """Holds who owns what against arithmetic from shapes."""
    counted = script.bytes()
    parameters = counted.parameters * (2 if script.ema else 1)
    phases = {each["name"]: each for each in answer["phases"]}
    state = script.state_bytes(counted)
    blocks = counted.slack * max(script.states, 2)

    def is_about(held: int, bytes_of_shapes: int) -> bool:
        return bytes_of_shapes <= held <= bytes_of_shapes + blocks

    step = phases["optimizer step"]["at_peak_bytes"]
    assert is_about(step["parameters"], parameters), (step, counted)
    assert is_about(step["gradients"], counted.trained), (step, counted)
    assert step["optimizer state"] <= state + blocks, (step, state)
    for name in ("forward", "backward"):
        held = phases[name]["at_peak_bytes"]
        if script.resume != "fresh":
            assert is_about(held["parameters"], parameters), (name, held, counted)
        if script.steps > 1:
            assert is_about(held["optimizer state"], state), (name, held, state)
        assert held["gradients"] <= counted.trained + blocks, (name, held, counted)
        assert held["gathered parameters"] == 0
    assert phases["backward"]["at_peak_bytes"]["other"] >= 2 * WORKSPACE  # of each thread
    least = parameters + counted.trained + state * (script.steps > 1)
    assert answer["peak_allocated_bytes"] >= least


def check_own_figures(
    answer: dict[str, Any], record: dict[str, Any], script: Script, how: str
) -> None:
    """Holds the answer against what the script read from ``torch.cuda`` in the same run."""
    assert record["done"] == answer["steps"], (how, record)
    assert answer["peak_allocated_bytes"] == record["peak"], (how, answer, record)
    assert answer["peak_reserved_bytes"] == record["reserved"], (how, answer, record)
    phases = {each["name"]: each["peak_allocated_bytes"] for each in answer["phases"]}
    own = record["phases"]
    for name in ("backward", "optimizer step"):
        assert phases[name] == own[name], (how, name, phases, own)
    assert phases["forward"] >= own["forward"], (how, phases, own)
    if not script.evaluates:
        assert phases["forward"] == own["forward"], (how, phases, own)


def lasting(answer: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in answer.items() if key not in PASSING}


def check_files(
    folder: Folder, answer: dict[str, Any], record: dict[str, Any], script: Script
) -> None:
    """Holds what was saved against the size that the script saw; a run with bytes leaves it."""
    file = folder.path / "last.pt"
    assert file.exists() == (script.saves and answer["is_real"])
    assert answer["files"] == int(script.saves)
    assert answer["saved_bytes"] == record["size"]
    if file.exists():
        assert file.stat().st_size == record["size"]
        file.unlink()


def judge_peaks(chance: random.Random, path: Path) -> None:
    """Runs a script dry, with bytes, and on two devices of about its peak."""
    script = Script(chance)
    folder = Folder(path, script.text())
    steps = () if script.steps == 2 else ("--steps", str(script.steps))
    large = ("--capacity", "24GiB", *steps)
    dry = folder.dry_run(*large, status=0)
    check_schema(dry)
    assert (dry["fits"], dry["is_complete"], dry["ended"]) == (True, True, "finished")
    assert dry["has_compiled"] == script.compiles
    assert (dry["out_of_memory"], dry["retries"]) == ([], 0)
    assert dry["steps"] == script.steps
    assert dry["is_cut"]
    assert dry["warnings"] == []
    (record,) = folder.records()
    check_own_figures(dry, record, script, "dry")
    check_owners(dry, script)
    check_files(folder, dry, record, script)

    real = folder.dry_run(*large, "--real", status=0)
    (record,) = folder.records()
    check_own_figures(real, record, script, "real")
    assert lasting(real) == lasting(dry | {"is_real": True})
    check_files(folder, real, record, script)

    exact = folder.dry_run("--capacity", f"{dry['needed_bytes']}B", *steps, status=0)
    check_schema(exact)
    folder.records()
    assert exact["headroom_bytes"] == 0
    assert exact["phases"] == [
        each | {"headroom_bytes": dry["peak_reserved_bytes"] - each["peak_reserved_bytes"]}
        for each in dry["phases"]
    ]
    check_too_small(folder, dry, steps, chance)


def check_too_small(
    folder: Folder, dry: dict[str, Any], steps: tuple[str, ...], chance: random.Random
) -> None:
    """Takes a device without room for all tensors of the peak: where it fails is the same."""
    held = rounded(chance.randrange(dry["peak_allocated_bytes"] // 3, dry["peak_allocated_bytes"]))
    capacity = dry["context_bytes"] + held - LINE
    small = folder.dry_run("--capacity", f"{capacity}B", *steps, status=1)
    check_schema(small)
    assert not small["fits"]
    assert small["headroom_bytes"] == capacity - dry["needed_bytes"] < 0
    assert [each | {"headroom_bytes": 0} for each in small["phases"]] == [
        each | {"headroom_bytes": 0} for each in dry["phases"]
    ]
    failed = folder.records()[0]
    error = small["out_of_memory"][0]
    name, line = error["line"].rsplit(":", 1)
    assert Path(folder.path, name).resolve() == folder.script.resolve(), error
    assert int(line) == failed["line"], (error, failed)
    assert error["asked_bytes"] > error["free_bytes"] >= 0, error
    assert error["free_bytes"] <= held
    assert error["phase"] in {each["name"] for each in dry["phases"]}, error


@pytest.mark.whole
def test_an_answer_is_what_torch_and_arithmetic_say(torture: Torture, tmp_path: Path) -> None:
    def judge(chance: random.Random) -> None:
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        path.mkdir()
        judge_peaks(chance, path)

    torture(judge)


def judge_ranks(chance: random.Random, path: Path) -> None:
    """Runs one rank of several, which holds what its shards and their shapes say."""
    script = Ranked.drawn(chance)
    folder = Folder(path, script.text())
    answer = folder.dry_run("--capacity", "24GiB", "--ranks", str(script.ranks), status=0)
    check_schema(answer)
    (record,) = folder.records()
    assert record["done"] == answer["steps"] == 2
    assert answer["peak_allocated_bytes"] == record["peak"], (answer, record)
    assert answer["peak_reserved_bytes"] == record["reserved"], (answer, record)
    phases = {each["name"]: each for each in answer["phases"]}
    step = phases["optimizer step"]
    assert step["peak_allocated_bytes"] == record["phases"]["optimizer step"]
    held = step["at_peak_bytes"]
    assert held["parameters"] == script.parameters, (script, held)
    assert held["optimizer state"] <= script.states * script.parameters, (script, held)
    forward = phases["forward"]["at_peak_bytes"]
    assert forward["optimizer state"] == script.states * script.parameters, (script, forward)
    gradients = held["gradients"]
    if script.shards:  # views of what each layer's reduce-scatter wrote
        assert script.raw <= gradients < script.raw + LINE * script.depth, (script, held)
        layer = rounded(script.width * (script.width + 1) * 4)
        assert forward["gathered parameters"] >= layer, (script, forward)
    else:  # and DDP's buckets, which together are as large
        buckets = gradients - script.parameters
        assert script.raw <= buckets <= script.raw + 2 * SPLIT + LINE * script.depth, (script, held)
        assert forward["gathered parameters"] == 0


def judge_fit(chance: random.Random, path: Path) -> None:
    """Asks what makes a script fit, adds the lines, and finds that it does."""
    script = Plain(4096, chance.randint(7, 10), chance.choice(["Adam", "AdamW"]))
    folder = Folder(path, script.text())
    slots = 3 * (128 << 20)  # of an offloaded optimizer, by default
    rest = 2 * script.parameters - slots
    room = chance.randrange(rest // 8, rest * 3 // 4)
    capacity = (534 << 20) + 2 * script.parameters + slots + (64 << 20) + room
    answer = folder.dry_run("--capacity", f"{capacity}B", "--others", "0B", "--fit", status=1)
    check_schema(answer)
    assert answer["fit"], answer
    *others, last = answer["fit"]
    assert not any(each["fits"] for each in others), answer["fit"]
    assert (last["fits"], last["error"]) == (True, None), answer["fit"]
    assert last["needed_bytes"] <= capacity
    (path / "record.jsonl").unlink()
    changed = Folder(path, replace(script, added="\n    ".join(last["lines"])).text())
    again = changed.dry_run("--capacity", f"{capacity}B", status=0)
    assert again["fits"], again
    assert again["needed_bytes"] == last["needed_bytes"], (again, last)


def judge_largest(chance: random.Random, path: Path) -> None:
    """Asks for the largest batch: it fits, and one more does not."""
    script = Plain(16384, chance.randint(6, 10), "SGD")
    folder = Folder(path, script.text())
    room = chance.randrange(40 << 20, 64 << 20)
    size = "--capacity", f"{(534 << 20) + 2 * script.parameters + room}B", "--others", "0B"
    answer = folder.dry_run(*size, "--largest", "batch", status=0)
    assert answer["of"] == "batch"
    largest = answer["largest"]
    for tried in answer["tried"]:
        assert tried["error"] is None, tried
        assert tried["fits"] == (tried["number"] <= largest), (tried, largest)
    check_schema(answer["answer"])
    inside = folder.dry_run(*size, status=0, of_script=("--batch-size", str(largest)))
    assert lasting(inside) == lasting(answer["answer"])
    outside = folder.dry_run(*size, status=1, of_script=("--batch-size", str(largest + 1)))
    assert not outside["fits"]


@pytest.mark.whole
@pytest.mark.parametrize("kind", ["ranks", "fit", "largest"])
def test_what_is_asked_of_a_dry_run_is_answered_right(
    torture: Torture, tmp_path: Path, kind: str
) -> None:
    of = {"ranks": judge_ranks, "fit": judge_fit, "largest": judge_largest}[kind]

    def judge(chance: random.Random) -> None:
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        path.mkdir()
        of(chance, path)

    torture(judge)
