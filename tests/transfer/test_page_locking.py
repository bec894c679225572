"""Memory that is mapped and registered here: page-locked while a copy or a tensor uses it, and then
the system's again. All cases run in one process, which the simulator cannot leave CUDA's place in.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from workers import finish, start

HERE = Path(__file__).parent
SHARED = HERE.parent / "sim"
sys.path.insert(0, str(SHARED))
from worker_cases import cases_of, judge  # noqa: E402  # of another folder

WORKER = HERE / "page_locking_worker.py"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("page_locking")
    finish(start("-W", "error", WORKER, folder, folder=SHARED))
    found: dict[str, str] = json.loads((folder / "outcomes.json").read_text())
    return found


@pytest.mark.parametrize("name", [name for _, name in cases_of(WORKER, {"case"})])
def test_registered_memory(outcomes: dict[str, str], name: str) -> None:
    judge(outcomes.get(name))
