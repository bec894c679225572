"""The operations in a process that never makes a second stream, where kernels run at their call."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.sim


@pytest.mark.whole
@pytest.mark.parametrize("name", ["test_copies.py", "test_operations.py", "test_training.py"])
def test_every_operation_test_holds_with_one_stream_too(name: str) -> None:
    operations = str(Path(__file__).with_name(name))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", operations],
        env={**os.environ, "RESIDENCY_TEST_ONE_STREAM": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
