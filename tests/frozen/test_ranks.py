"""Streamed models under DistributedDataParallel and FSDP2, on two ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "sim"))

from worker_cases import cases_of, run_phase

pytestmark = [pytest.mark.sim, pytest.mark.whole]

WORKER = Path(__file__).with_name("frozen_worker.py")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What became of every case, by rank; the simulator is built already."""
    from residency import sim

    sim.enable("1GiB")
    return run_phase(WORKER, tmp_path_factory.mktemp("frozen"), "two", 2)


@pytest.mark.parametrize("case", [name for _, name in cases_of(WORKER, {"two"})])
def test_on_two_ranks(outcomes: list[dict[str, str]], case: str) -> None:
    for rank, of_rank in enumerate(outcomes):
        assert of_rank.get(case) == "passed", f"rank {rank}: {of_rank.get(case)}"
