"""Runs of a thousand steps leave nothing behind, whatever the order of their transitions.

What is judged, and why each has a process of its own, stands in ``long_run_program.py``.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from limits import WORKER_SECONDS

PROGRAM = Path(__file__).parent / "long_run_program.py"


@pytest.mark.whole
def test_runs_of_a_thousand_steps_with_every_transition_leave_nothing_behind(
    tmp_path: Path, torture: Callable[..., None]
) -> None:
    def judge(chance: random.Random) -> None:
        with TemporaryDirectory(dir=tmp_path) as folder:
            run = subprocess.run(
                [sys.executable, str(PROGRAM), str(chance.getrandbits(32)), folder],
                capture_output=True,
                text=True,
                timeout=WORKER_SECONDS,
            )
        assert run.returncode == 0, run.stdout + run.stderr

    torture(judge)
