"""What the tests of memory figures share."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import limits
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from holding import NUM_ELEMENTS, Make

import residency
from residency._memory import _post_mortem


@pytest.fixture
def make(device: torch.device) -> Make:
    """Makes a tensor of 1 MiB on the device."""
    return functools.partial(torch.ones, NUM_ELEMENTS, device=device)


@pytest.fixture
def search_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the search for holders end on a busy machine, too."""
    monkeypatch.setattr(_post_mortem, "_SEARCH_SECONDS", 100.0)


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., str]:
    """Runs a program in a process of its own and returns what it printed."""

    def run(program: str, *, status: int = 0, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", program],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            timeout=limits.WORKER_SECONDS,
            env={
                **os.environ,
                "PYTHONPATH": str(Path(residency.__file__).parents[1]),
                **environment,
            },
        )
        assert done.returncode == status, done.stderr
        return done.stdout

    return run
