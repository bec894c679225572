"""Fixtures of the tests of freeing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import residency
from residency._handoff import _peer


@pytest.fixture
def simulated_workspaces(device: torch.device) -> Iterator[torch.device]:
    """The simulated accelerator, charging the matrix library's workspaces."""
    from residency import _device, sim

    yield sim.enable("1GiB", workspaces=True, device=device.type)
    _device.clear_workspaces(device)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """The path at which two processes meet, which are strangers again afterwards."""
    yield tmp_path / "device.sock"
    _peer._takers.drop(tmp_path / "device.sock")
    _peer._releasers.drop(tmp_path / "device.sock")


@pytest.fixture
def start(path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts the other side of a hand-off, which does as a stage of ``peers.py`` says."""
    started: list[subprocess.Popen[bytes]] = []

    def start(side: str, stage: str, need: int = 0) -> subprocess.Popen[bytes]:
        source = str(Path(residency.__file__).parents[1])
        program = Path(__file__).with_name("peers.py")
        process = subprocess.Popen(
            [sys.executable, str(program), side, str(path), stage, str(need)],
            stdin=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": source},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
