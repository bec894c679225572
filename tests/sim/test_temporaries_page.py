"""The docs' page of operations with temporaries is the simulator's own table."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

pytestmark = pytest.mark.sim
ROOT = Path(__file__).parents[2]


def test_the_page_is_as_the_table_makes_it(monkeypatch: pytest.MonkeyPatch, built: None) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    temporaries = importlib.import_module("benchmarks.temporaries")
    assert temporaries.PAGE.read_text(encoding="utf-8") == temporaries.page(), (
        "python -m benchmarks.temporaries --write"
    )
