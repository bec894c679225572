"""Where verl is not installed, these tests are not collected: `make test-verl` has it.

verl pins a transformers of its own, so it has an environment of its own, .venv-verl.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import limits
import pytest

import residency

collect_ignore_glob = [] if importlib.util.find_spec("verl") else ["test_*.py"]


@pytest.fixture(scope="session")
def variables() -> dict[str, str]:
    """What processes of these tests have in their environment."""
    source = str(Path(residency.__file__).parents[1])
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="session")
def built(variables: dict[str, str]) -> None:
    """The simulator is compiled: what limits the time of a test's process is not the compiler."""
    script = "from residency import sim; sim.enable(device='cuda')"
    command = [sys.executable, "-c", script]
    subprocess.run(
        command, env=variables, check=True, capture_output=True, timeout=limits.WORKER_SECONDS
    )
