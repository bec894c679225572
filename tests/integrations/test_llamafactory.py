"""The optimizer plugin for LLaMA-Factory's v1: with that itself where it is installed, which pins
older frameworks, and with a stand-in for its published interface where it is not.

With llamafactory 0.9.5, and with its source at ff6d4d12, on transformers 5.16.1 and accelerate
1.13.0 all cases passed (2026-11-24); ``make test-frameworks`` has the first of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "sim"))

from worker_cases import cases_of, judge, run_cases

pytestmark = pytest.mark.whole  # a process that imports Transformers
WORKER = Path(__file__).with_name("llamafactory_worker.py")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_cases(WORKER, tmp_path_factory.mktemp("llamafactory"), "transformers")


@pytest.mark.parametrize("case", [name for _, name in cases_of(WORKER, {"case"})])
def test_with_llamafactory(outcomes: dict[str, str], case: str) -> None:
    judge(outcomes.get(case))
