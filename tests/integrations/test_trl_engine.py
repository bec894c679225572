"""The hand-off to a vLLM engine of TRL's: its own trainer and ``VLLMGeneration``, with an engine
that stands in for vLLM's, in a process of its own on the device that both share.

With trl 1.16.0, transformers 5.23.0 and accelerate 1.15.0 (2026-11-24). vLLM needs a GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from limits import WORKER_SECONDS

sys.path.insert(0, str(Path(__file__).parents[1] / "sim"))

from worker_cases import cases_of, judge, run_cases

from residency.testing import simulated_device_type

pytestmark = [  # minutes, on a busy machine: each run of a trainer has an engine's process
    pytest.mark.whole,
    pytest.mark.timeout(2 * WORKER_SECONDS),
    pytest.mark.skipif(simulated_device_type() is None, reason="shares a simulated device"),
]
HERE = Path(__file__).parent
WORKER = HERE / "trl_engine_worker.py"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_cases(WORKER, tmp_path_factory.mktemp("trl"), "trl", "datasets")


@pytest.mark.parametrize("case", [name for _, name in cases_of(WORKER, {"case"})])
def test_with_trl(outcomes: dict[str, str], case: str) -> None:
    judge(outcomes.get(case))
