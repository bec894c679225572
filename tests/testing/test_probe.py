"""The probes of a machine: each line's verdict, and the status that a command ends with."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import residency

pytestmark = pytest.mark.sim
ROOT = Path(__file__).parents[2]


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command."""
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.probe.__main__")


def lines_of(printed: str, verdict: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith(verdict)]


@pytest.mark.whole
def test_every_probe_passes_on_the_simulator_in_cudas_place(probe: Any, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.probe", "--small", "--simulated"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
    )
    assert (done.returncode, lines_of(done.stdout, "FAIL")) == (0, []), done.stdout + done.stderr
    assert len(lines_of(done.stdout, "PASS")) > len(probe.PROBES)
    assert [line.split()[2] for line in lines_of(done.stdout, "INFO  --")] == list(probe.PROBES)
    assert list(tmp_path.iterdir()) == []


def test_a_probe_that_finds_otherwise_says_fail_and_the_others_go_on(
    probe: Any,
    tested_device: torch.device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(14, "Bad address")  # what a driver's own mapping may answer

    monkeypatch.setattr(os, "pwritev", refuse)
    assert probe.main(["pinned_memory", "threads", "--small", "--folder", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    (line,) = lines_of(printed, "FAIL")
    assert "O_DIRECT writes from a slab" in line
    assert "Bad address" in line
    assert "keep their streams" in lines_of(printed, "PASS")[-1]
    assert printed.splitlines()[-1].split()[-1] == "1"


def test_a_probe_that_raises_says_fail_and_the_others_go_on(
    probe: Any,
    tested_device: torch.device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("an illegal memory access\nwith more to say")

    monkeypatch.setattr(residency, "snapshot", fail)
    assert probe.main(["snapshots", "threads", "--small", "--folder", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    (line,) = lines_of(printed.out, "FAIL")
    assert line.endswith("raised RuntimeError: an illegal memory access")
    assert "Traceback" in printed.err
    assert "keep their streams" in lines_of(printed.out, "PASS")[-1]


def test_a_probe_that_does_not_exist_is_named(
    probe: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        probe.main(["no_such_probe"])
    assert "there is no no_such_probe" in capsys.readouterr().err


def test_a_machine_without_an_accelerator_is_told_what_to_do(
    probe: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("residency._device.accelerator", lambda: None)
    assert probe.main(["threads"]) == 2
    assert "--simulated" in capsys.readouterr().err
