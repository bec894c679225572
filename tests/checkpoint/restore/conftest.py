"""Fixtures of the restore tests."""

import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import maker


@pytest.fixture
def save(tmp_path):
    """Writes a save of a state; several are those of the ranks."""
    count = itertools.count()

    def make(*states, rng=None, **settings):
        parts = [maker.Part(s, rng=rng, rank=rank) for rank, s in enumerate(states)]
        return maker.write(tmp_path / f"step-{next(count):08d}", *parts, **settings)

    return make


@pytest.fixture
def restore():
    return maker.restore_state
