"""Where verl is not installed, these tests are not collected: `make test-verl` has it.

verl pins a transformers of its own, so it has an environment of its own, .venv-verl.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import limits
import pytest
from workers import environment

collect_ignore_glob = [] if importlib.util.find_spec("verl") else ["test_*.py"]


@pytest.fixture(scope="session")
def variables() -> dict[str, str]:
    """What processes of these tests have in their environment."""
    return environment() | {"CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="session")
def built(variables: dict[str, str]) -> None:
    """The simulator is compiled: what limits the time of a test's process is not the compiler."""
    script = "from residency import sim; sim.enable(device='cuda')"
    command = [sys.executable, "-c", script]
    subprocess.run(
        command, env=variables, check=True, capture_output=True, timeout=limits.WORKER_SECONDS
    )
