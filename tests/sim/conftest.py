"""What tests of the simulated accelerator share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from residency import sim


@pytest.fixture(scope="session")
def built() -> None:
    """Both libraries are there: what limits the time of a test's processes is not the compiler."""
    sim.enable("1GiB")
    source = str(Path(sim.__file__).parents[2])
    path = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])
    script = "from residency import sim; sim.enable(device='cuda')"
    subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        check=True,
        capture_output=True,
        timeout=290,
    )
