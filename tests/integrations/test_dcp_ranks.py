"""The storage writer and reader for torch.distributed.checkpoint on two ranks.

``dcp_worker.py`` is one of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "sim"))

from worker_cases import cases_of, run_phase

pytestmark = pytest.mark.sim

WORKER = Path(__file__).with_name("dcp_worker.py")


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run_phase(WORKER, tmp_path_factory.mktemp("ranks"), "case", 2)


@pytest.mark.parametrize("case", [case for _, case in cases_of(WORKER, {"case"})])
def test_two_ranks(of_two: list[dict[str, str]], case: str) -> None:
    for rank, outcomes in enumerate(of_two):
        assert outcomes.get(case) == "passed", f"rank {rank}: {outcomes.get(case)}"
