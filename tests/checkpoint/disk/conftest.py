"""Fixtures of the torch-free layer: small saves, and processes that make or are killed in them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).with_name("saves.py")


@pytest.fixture(scope="session")
def saves() -> ModuleType:
    """The module ``saves.py``, which also runs as a process."""
    spec = importlib.util.spec_from_file_location("residency_test_saves", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def start() -> Callable[..., subprocess.Popen[str]]:
    """Starts ``saves.py`` as a process, with its arguments."""

    def start(*arguments: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(SCRIPT), *map(str, arguments)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    return start
