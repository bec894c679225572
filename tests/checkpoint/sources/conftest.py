"""The trap that tests of pickles set.

The tests of this folder need no device, and none of them runs a backward pass: torch's autograd
counts the devices at the first one, and tests after these enable the simulated one.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for stored_contents


class Trap:
    """Pickles as a call of a function that every process has, with a path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return (os.mkdir, (str(self.path),))


@pytest.fixture
def trap(tmp_path: Path) -> Iterator[tuple[Trap, Path]]:
    """An object whose pickle makes a directory, and that directory, which a test must not find."""
    made = tmp_path / "made-by-a-pickle"
    pickle.loads(pickle.dumps(Trap(made)))
    assert made.is_dir()  # the trap works
    made.rmdir()
    yield Trap(made), made
    assert not made.exists(), "code in a pickle ran"
