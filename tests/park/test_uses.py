"""Parked modules under FSDP2, tensor parallelism and DDP, and in the hands of every user.

``park_worker.py`` is one process; a crash in any of its cases fails them all.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "sim"))

from worker_cases import cases_of, run_phase

pytestmark = pytest.mark.sim

WORKER = Path(__file__).with_name("park_worker.py")
PHASES = {"two": 2, "uses": 1}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    """What became of every case, by phase and rank; the simulator is built already."""
    from residency import sim

    sim.enable("1GiB")
    folder = tmp_path_factory.mktemp("parked")
    with ThreadPoolExecutor() as threads:
        runs = {p: threads.submit(run_phase, WORKER, folder, p, PHASES[p]) for p in PHASES}
        return {phase: run.result() for phase, run in runs.items()}


@pytest.mark.parametrize(("phase", "case"), cases_of(WORKER, PHASES))
def test_parked_modules(outcomes: dict[str, list[dict[str, str]]], phase: str, case: str) -> None:
    for rank, of_rank in enumerate(outcomes[phase]):
        assert of_rank.get(case) == "passed", f"rank {rank}: {of_rank.get(case)}"
