"""What a recording writes of the end of a run: the error, its phase, and what came last."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from limits import WORKER_SECONDS

import residency
from residency._cli import main
from residency._memory import _record
from residency._units import MIB, format_bytes
from residency.testing import simulated_device_type, tested_device_type as type_under_test

with_room = pytest.mark.sim_device(capacity=256 << 20, schedule="late", check_races=False)


def last_line(path: Path) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(path.read_text().splitlines()[-1])
    return line


def test_an_error_that_leaves_the_recording_is_in_its_last_line_with_its_phase(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.jsonl"
    with (
        pytest.raises(KeyError),
        residency.phase("around"),
        residency.record(path),
        residency.phase("step"),
        residency.phase("inner"),
    ):
        raise KeyError("x")
    line = last_line(path)
    assert (line["error"], line["phase"]) == ("KeyError: 'x'", "around/step/inner")


def test_an_error_outside_of_every_phase_has_none(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    def fail_twice() -> None:
        with pytest.raises(ValueError, match="one"), residency.phase("step"):
            raise ValueError("one")
        raise ValueError("two\nlines")

    with pytest.raises(ValueError, match="two"), residency.record(path):
        fail_twice()
    line = last_line(path)
    assert (line["error"], line["phase"]) == ("ValueError: two", None)


@pytest.mark.parametrize(("status", "error"), [(0, None), (3, "SystemExit: 3")])
def test_leaving_with_a_bad_status_is_an_error_and_with_a_good_one_is_none(
    tmp_path: Path, status: int, error: str | None
) -> None:
    with pytest.raises(SystemExit), residency.record(tmp_path / "run.jsonl"):
        raise SystemExit(status)
    assert last_line(tmp_path / "run.jsonl").get("error") == error


@with_room
def test_the_forward_pass_in_which_memory_ran_out_is_named(
    device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    model = torch.nn.Linear(8, 8, device=device)

    def run() -> torch.Tensor:
        loss = model(torch.ones(2, 8, device=device)).sum()
        return loss + torch.ones(whole, dtype=torch.uint8, device=device).sum()

    whole = torch.accelerator.get_memory_info(device)[1]
    with pytest.raises(torch.OutOfMemoryError), residency.record(path):
        run()
    line = last_line(path)
    assert line["phase"] == "forward"
    assert line["num_out_of_memory"] > 0
    assert main(["report", str(path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"the run ended in an error, in forward: {format_bytes(whole)} were asked for" in out


@with_room
def test_the_last_line_has_what_came_after_the_last_phase(
    device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    with residency.record(path):
        with residency.phase("load"):
            pass
        torch.empty(40 * MIB, dtype=torch.uint8, device=device)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 40, dtype=torch.uint8, device=device)
    assert main(["report", str(path)]) == 0
    out = capsys.readouterr().out
    assert "peak 40.00 MiB after the last phase" in out
    assert "1 allocation failed, out of memory" in out


def test_a_device_that_cannot_be_read_at_the_end_leaves_the_record_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lost(device: object) -> None:
        raise RuntimeError("device lost")

    with residency.record(tmp_path / "run.jsonl"), residency.phase("step"):
        monkeypatch.setattr(_record, "measure", lost)
    assert last_line(tmp_path / "run.jsonl")["kind"] == "close"
    assert "could not read the memory at the end" in caplog.text


def test_a_record_says_what_was_run_and_with_which_versions(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with residency.record(path):
        pass
    header = json.loads(path.read_text().splitlines()[0])
    assert header["torch"] == torch.__version__
    assert header["command"].split()[0] == sys.orig_argv[0]
    assert {"residency", "python"} <= set(header)


SCRIPT = f"""
import sys, torch
if {simulated_device_type()!r} is not None:
    from residency import sim
    sim.enable("1GiB", device={simulated_device_type()!r})
if sys.argv[1] == "early":
    torch.empty(1 << 50, dtype=torch.uint8, device={type_under_test()!r})
model = torch.nn.Linear(8, 8).to({type_under_test()!r})
optimizer = torch.optim.SGD(model.parameters())

def closure():
    loss = model(torch.ones(2, 8, device={type_under_test()!r})).sum()
    torch.empty(1 << 50, dtype=torch.uint8, device={type_under_test()!r})

optimizer.step(closure)
"""


@pytest.mark.alone
@pytest.mark.parametrize(
    ("at", "where"),
    [
        ("early", "outside of every phase"),
        ("late", "in optimizer_step/forward"),
    ],
)
def test_a_script_that_runs_out_of_memory_has_a_record_that_says_so(
    tmp_path: Path, at: str, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    path = tmp_path / "run.jsonl"
    command = ["-o", str(path), "--", sys.executable, "train.py", at]
    done = subprocess.run(
        [sys.executable, "-m", "residency", "record", *command],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=WORKER_SECONDS,
        env={**os.environ, "PYTHONPATH": str(Path(residency.__file__).parents[1])},
    )
    assert done.returncode == 1, done.stderr
    assert "residency: the device's memory when this failed" in done.stderr
    assert main(["report", str(path)]) == 0
    out, err = capsys.readouterr()
    told = f"run.jsonl: the run ended in an error, {where}: 1024.00 TiB were asked for."
    assert told in " ".join(out.split())
    assert err == ""
