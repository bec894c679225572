"""Ranks of a process group hand over together, or none of them does.

``ranks_worker.py`` is one rank; it runs all cases, so that they cost one start.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "sim"))

from worker_cases import cases_of, run_phase

pytestmark = pytest.mark.sim

WORKER = Path(__file__).with_name("ranks_worker.py")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What became of every case, by rank; the simulator is built already."""
    from residency import sim

    sim.enable("1GiB")
    return run_phase(WORKER, tmp_path_factory.mktemp("ranks"), "pair", 2)


@pytest.mark.parametrize(("phase", "case"), cases_of(WORKER, {"pair"}))
def test_ranks(outcomes: list[dict[str, str]], phase: str, case: str) -> None:
    for rank, of_rank in enumerate(outcomes):
        assert of_rank.get(case) == "passed", f"rank {rank}: {of_rank.get(case)}"
