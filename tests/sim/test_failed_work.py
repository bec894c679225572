"""Work that fails harms nothing else, and what used to crash the process does not.

A crash would end the tests, so the cases run in processes of their own (failures_worker.py), once
with work that runs at its call and once with work that is queued.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from worker_cases import cases_of, run_phase

pytestmark = pytest.mark.sim

WORKER = Path(__file__).with_name("failures_worker.py")
CASES = [name for _, name in cases_of(WORKER, {"case"})]


@pytest.fixture(scope="module", params=["alone", "beside"])
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    return run_phase(WORKER, tmp_path_factory.mktemp("failures"), request.param, 1)[0]


@pytest.mark.parametrize("case", CASES)
def test_after_work_that_failed(outcomes: dict[str, str], case: str) -> None:
    assert outcomes.get(case) == "passed", outcomes.get(case)
