"""What the tests of memory figures share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from limits import WORKER_SECONDS

import residency


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
            timeout=WORKER_SECONDS,
            env={
                **os.environ,
                "PYTHONPATH": str(Path(residency.__file__).parents[1]),
                **environment,
            },
        )
        assert done.returncode == status, done.stderr
        return done.stdout

    return run
