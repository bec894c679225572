"""Recordings: what is in the file, after a kill too; known calls; ranks; the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import residency
from residency._cli import main
from residency._memory import _ledger, _phase
from residency._report import read_run, read_runs
from residency.testing import simulated_device_type, tested_device_type as type_under_test

SOURCE = str(Path(residency.__file__).parents[1])
MIB = 1 << 20
STEP = ["forward", "backward", "optimizer_step"]

with_room = pytest.mark.sim_device(capacity=256 << 20, schedule="late", check_races=False)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _phases(path: Path) -> list[str]:
    return [line["phase"] for line in _lines(path) if line["kind"] == "end"]


# ---------------------------------------------------------------------------------------- the file


@with_room
def test_a_record_has_every_boundary_with_its_figures(device: torch.device, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with residency.record(path) as ledger:
        assert ledger.path == path
        for _ in range(2):
            with residency.phase("load"):
                kept = torch.empty(3 * MIB, dtype=torch.uint8, device=device)
        assert ledger.num_visits == 2
    lines = _lines(path)
    assert [line["kind"] for line in lines] == ["header", *["begin", "end"] * 2, "close"]
    assert [line["visit"] for line in lines[1:-1]] == [0, 0, 1, 1]
    assert (lines[1]["held"], lines[2]["held"]) == (0, 3 * MIB)
    assert lines[2]["stuck"] == 17 * MIB
    assert lines[2]["capacity"] == torch.accelerator.get_memory_info()[1]
    assert (lines[0]["rank"], lines[0]["world_size"], lines[0]["peaks"]) == (0, 1, "bounds")
    assert [line["t"] for line in lines] == sorted(line["t"] for line in lines)
    del kept


@with_room
def test_an_exception_that_leaves_the_block_closes_the_record(
    device: torch.device, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    with pytest.raises(KeyError), residency.record(path), residency.phase("step"):
        raise KeyError("x")
    lines = _lines(path)
    assert lines[2]["error"] == "KeyError: 'x'"
    assert lines[-1]["kind"] == "close"
    with residency.record(path), residency.phase("again"):  # the next recording can start
        pass
    assert _phases(path) == ["again"]


def test_a_second_recording_of_one_process_is_refused(tmp_path: Path) -> None:
    with (
        residency.record(tmp_path / "a.jsonl"),
        pytest.raises(residency.RefusedError, match=r"a\.jsonl"),
        residency.record(tmp_path / "b.jsonl"),
    ):
        pass
    assert not (tmp_path / "b.jsonl").exists()


def test_what_cannot_be_recorded_is_refused_before_anything_starts(tmp_path: Path) -> None:
    nowhere = tmp_path / "missing" / "run.jsonl"
    with (
        pytest.raises(residency.InvalidArgumentError, match="No such file"),
        residency.record(nowhere),
    ):
        pass
    with (
        pytest.raises(residency.InvalidArgumentError, match="'bounds' or 'exact'"),
        residency.record(tmp_path / "run.jsonl", peaks="all"),
    ):
        pass
    assert _phase.boundaries.ledger is None


def test_a_disk_that_is_full_ends_the_recording_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.jsonl"

    def full(file: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with residency.record(path) as ledger:
        with monkeypatch.context() as broken:
            broken.setattr(_ledger.os, "write", full)
            for _ in range(3):
                with residency.phase("step"):
                    pass
        assert not ledger.is_writing
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    assert [line["kind"] for line in _lines(path)] == ["header"]


KILLED = """
import os, signal, residency
with residency.record("run.jsonl"):
    for step in range(3):
        with residency.phase("step"):
            pass
    with residency.phase("save"):
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_record_is_whole_after_a_kill(run_python: Callable[..., str], tmp_path: Path) -> None:
    run_python(KILLED, status=-signal.SIGKILL)
    run = read_run(tmp_path / "run.jsonl")
    assert [(visit.phase, visit.end is not None) for visit in run.visits] == [
        *[("step", True)] * 3,
        ("save", False),
    ]
    assert run.warnings == [
        "run.jsonl:8: phase 'save' begins and never ends",
        "run.jsonl: the recording was cut off: the last line is missing",
    ]


FORKING = """
import os, residency
with residency.record("run.jsonl"), residency.phase("outer"):
    child = os.fork()
    if child == 0:
        with residency.phase("in the child"):
            pass
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_a_forked_child_writes_nothing(run_python: Callable[..., str], tmp_path: Path) -> None:
    run_python(FORKING)
    assert _phases(tmp_path / "run.jsonl") == ["outer"]


# ------------------------------------------------------------------------------------- known calls


@with_room
def test_known_calls_are_phases_and_are_taken_back(device: torch.device, tmp_path: Path) -> None:
    before = (torch.save, torch.load, torch.autograd.backward, torch.nn.Module.__call__)
    model = torch.nn.Linear(8, 8).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    with residency.record(tmp_path / "run.jsonl"):
        model(torch.ones(2, 8, device=device)).sum().backward()
        optimizer.step()
        torch.save(model.state_dict(), tmp_path / "model.pt")
        assert torch.load(tmp_path / "model.pt").keys() == model.state_dict().keys()
        assert torch.save.__name__ == "save"
    after = (torch.save, torch.load, torch.autograd.backward, torch.nn.Module.__call__)
    assert after == before
    model(torch.ones(2, 8, device=device)).sum().backward()
    optimizer.step()
    torch.save({}, tmp_path / "model.pt")
    assert _phases(tmp_path / "run.jsonl") == [*STEP, "save", "load"]


@with_room
def test_a_checkpointer_has_phases_of_its_own(device: torch.device, tmp_path: Path) -> None:
    model = torch.nn.Linear(8, 8).to(device)
    with (
        residency.record(tmp_path / "run.jsonl"),
        residency.Checkpointer(tmp_path / "saves") as checkpointer,
    ):
        checkpointer.save(1, {"model": model}).wait()
        assert checkpointer.restore({"model": model}) == 1
    assert _phases(tmp_path / "run.jsonl") == ["save", "load"]


@with_room
def test_without_known_calls_only_named_phases_are_recorded(
    device: torch.device, tmp_path: Path
) -> None:
    with residency.record(tmp_path / "run.jsonl", calls=False), residency.phase("mine"):
        torch.save({}, tmp_path / "model.pt")
    assert _phases(tmp_path / "run.jsonl") == ["mine"]


@with_room
def test_a_step_that_raises_does_not_stay_open(device: torch.device, tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.zeros(8, device=device))
    optimizer = torch.optim.SGD([parameter])

    def fail() -> float:
        raise ValueError("no loss")

    with residency.record(tmp_path / "run.jsonl"):
        for _ in range(2):
            with pytest.raises(ValueError, match="no loss"), residency.phase("step"):
                optimizer.step(fail)
        with pytest.raises(ValueError, match="no loss"):
            optimizer.step(fail)
        optimizer.step()
    assert _phases(tmp_path / "run.jsonl") == [
        *["step/optimizer_step", "step"] * 2,
        *["optimizer_step"] * 2,
    ]
    assert not _phase.open_phases()


@with_room
def test_a_function_put_around_ours_stays_when_ours_is_taken_back(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch.save
    monkeypatch.setattr(torch, "save", real)  # back at the end of the test
    with residency.record(tmp_path / "run.jsonl"):
        inner = torch.save

        def theirs(*args: Any, **kwargs: Any) -> Any:
            return inner(*args, **kwargs)

        torch.save = theirs
    assert torch.save is theirs
    torch.save({}, tmp_path / "x.pt")
    assert _phases(tmp_path / "run.jsonl") == []


# -------------------------------------------------------------------------------- the command line

SCRIPT = f"""
import sys, torch
if {simulated_device_type()!r} is not None:
    from residency import sim
    sim.enable("1GiB", device={simulated_device_type()!r})
model = torch.nn.Linear(8, 8).to({type_under_test()!r})
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.ones(2, 8, device={type_under_test()!r})).sum().backward()
    optimizer.step()
torch.save(model.state_dict(), "model.pt")
assert torch.accelerator.max_memory_allocated() > 0
print("arguments", *sys.argv[1:])
sys.exit(3)
"""


def _record(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "residency", "record", *command],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        timeout=200,
        env={**os.environ, "PYTHONPATH": SOURCE, **environment},
    )


# What comes first may be residency, of which a module imports torch before it is whole.
@pytest.mark.parametrize("first", ["", "from residency import Checkpointer\n"])
def test_a_script_is_recorded_and_its_status_returned(tmp_path: Path, first: str) -> None:
    (tmp_path / "train.py").write_text(first + SCRIPT)
    done = _record(tmp_path, "--", sys.executable, "train.py", "--lr", "1")
    assert done.returncode == 3, done.stderr
    assert done.stdout == "arguments --lr 1\n"
    assert f"recorded {tmp_path / 'run.jsonl'}" in done.stderr
    assert _phases(tmp_path / "run.jsonl") == [*STEP, *STEP, "save"]
    assert _lines(tmp_path / "run.jsonl")[0]["peaks"] == "bounds"
    assert read_run(tmp_path / "run.jsonl").warnings == []


def test_a_module_is_recorded_and_the_hidden_sitecustomize_runs(tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__main__.py").write_text(SCRIPT)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("print('theirs')")
    paths = os.pathsep.join([SOURCE, str(tmp_path / "site")])
    command = ("-o", "out.jsonl", "--peaks", "exact", "--", sys.executable, "-m", "pkg")
    done = _record(tmp_path, *command, PYTHONPATH=paths)
    assert done.returncode == 3, done.stderr
    # Once by the command itself, and once by the process that it starts.
    assert done.stdout == "theirs\ntheirs\narguments\n"
    assert _phases(tmp_path / "out.jsonl") == [*STEP, *STEP, "save"]
    assert _lines(tmp_path / "out.jsonl")[0]["peaks"] == "exact"


OWN = """
import residency, torch
with residency.phase("before"):
    pass
with residency.phase("around"), residency.record("own.jsonl"):
    with residency.phase("own"):
        torch.save({}, "x.pt")
with residency.phase("after"):
    pass
"""


def test_a_script_that_records_itself_runs_under_the_command_too(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OWN)
    done = _record(tmp_path, "--", sys.executable, "train.py")
    assert done.returncode == 0, done.stderr
    assert _phases(tmp_path / "own.jsonl") == ["around/own/save", "around/own"]
    assert _phases(tmp_path / "run.jsonl") == ["before", "around", "after"]


RANKED = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
torch.save({}, f"{dist.get_rank()}.pt")
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.whole
def test_every_rank_of_torchrun_has_a_file(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANKED)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = _record(tmp_path, "--", *torchrun, "train.py")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert _phases(tmp_path / f"run.rank{rank}.jsonl") == ["save"]
    runs = read_runs(tmp_path / "run.jsonl")  # the launcher, which has no phases, has no file
    assert [run.rank for run in runs] == [0, 1]


def test_commands_that_cannot_be_recorded_are_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for command, message in (
        (["record"], "there is no command"),
        (["record", "--", "no-such-program-at-all"], "cannot be started"),
        (["record", "-o", "no/such/run.jsonl", "--", "true"], "cannot be written"),
    ):
        assert main(command) == 2
        assert message in capsys.readouterr().err
    assert main(["record", "--", "true"]) == 0
    assert "no Python process of the command has used torch" in capsys.readouterr().err


@with_room
@pytest.mark.parametrize("when", ["before", "inside"])
def test_steps_of_an_optimizer_that_is_offloaded_have_not_failed(
    device: torch.device, tmp_path: Path, when: str
) -> None:
    model = torch.nn.Linear(64, 64, device=device)
    optimizer = torch.optim.AdamW(model.parameters())
    if when == "before":
        residency.offload_optimizer(optimizer, bucket="1MiB")
    with residency.record(tmp_path / "run.jsonl"):
        if when == "inside":
            residency.offload_optimizer(optimizer, bucket="1MiB")
        for _ in range(3):
            model(torch.ones(2, 64, device=device)).sum().backward()
            optimizer.step()
    ends = [line for line in _lines(tmp_path / "run.jsonl") if line["kind"] == "end"]
    steps = [line for line in ends if line["phase"] == "optimizer_step"]
    assert len(steps) == 3
    assert not any(line.get("error") for line in ends), ends
