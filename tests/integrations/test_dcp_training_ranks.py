"""`PinnedStager`, `TrainState` and XTuner's round trip with FSDP2, on one rank and on two.

``dcp_training_worker.py`` is one rank; a later phase reads the checkpoints of the ones before.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "sim"))

from worker_cases import cases_of, run_phase

pytestmark = [pytest.mark.sim, pytest.mark.whole]

WORKER = Path(__file__).with_name("dcp_training_worker.py")
PHASES = {"one": 1, "two": 2, "back": 1}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    """What became of every case, by phase and rank; the simulator is built already."""
    from residency import sim

    sim.enable("1GiB")
    folder = tmp_path_factory.mktemp("ranks")
    return {phase: run_phase(WORKER, folder, phase, PHASES[phase]) for phase in PHASES}


@pytest.mark.parametrize(("phase", "case"), cases_of(WORKER, PHASES))
def test_ranks(outcomes: dict[str, list[dict[str, str]]], phase: str, case: str) -> None:
    for rank, of_rank in enumerate(outcomes[phase]):
        assert of_rank.get(case) == "passed", f"rank {rank}: {of_rank.get(case)}"
