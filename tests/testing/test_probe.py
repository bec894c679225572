"""The probes of a machine: each line's verdict, and the status that a command ends with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import residency
from residency.testing.probe.__main__ import PROBES, main

pytestmark = pytest.mark.sim
SOURCE = Path(residency.__file__).parents[1]


def lines_of(printed: str, verdict: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith(verdict)]


@pytest.mark.whole
def test_every_probe_passes_on_the_simulator_in_cudas_place(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "residency.testing.probe", "--small", "--simulated"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    assert (done.returncode, lines_of(done.stdout, "FAIL")) == (0, []), done.stdout + done.stderr
    assert len(lines_of(done.stdout, "PASS")) > len(PROBES)
    assert [line.split()[2] for line in lines_of(done.stdout, "INFO  --")] == list(PROBES)
    assert list(tmp_path.iterdir()) == []


def test_a_probe_that_finds_otherwise_says_fail_and_the_others_go_on(
    tested_device: torch.device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(14, "Bad address")  # what a driver's own mapping may answer

    monkeypatch.setattr(os, "pwritev", refuse)
    assert main(["pinned_memory", "threads", "--small", "--folder", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    (line,) = lines_of(printed, "FAIL")
    assert "O_DIRECT writes from a slab" in line
    assert "Bad address" in line
    assert "keep their streams" in lines_of(printed, "PASS")[-1]
    assert printed.splitlines()[-1].split()[-1] == "1"


def test_a_probe_that_raises_says_fail_and_the_others_go_on(
    tested_device: torch.device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("an illegal memory access\nwith more to say")

    monkeypatch.setattr(residency, "snapshot", fail)
    assert main(["snapshots", "threads", "--small", "--folder", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    (line,) = lines_of(printed.out, "FAIL")
    assert line.endswith("raised RuntimeError: an illegal memory access")
    assert "Traceback" in printed.err
    assert "keep their streams" in lines_of(printed.out, "PASS")[-1]


def test_a_probe_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["no_such_probe"])
    assert "there is no no_such_probe" in capsys.readouterr().err


def test_a_machine_without_an_accelerator_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("residency._device.accelerator", lambda: None)
    assert main(["threads"]) == 2
    assert "--simulated" in capsys.readouterr().err
