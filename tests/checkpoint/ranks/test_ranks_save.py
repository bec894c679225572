"""Several ranks make one save, restore it on as many ranks and on others, and fail together.

``ranks_worker.py`` is one rank; a later phase reads what the ones before wrote. Ranks that are not
in step wait for seconds before they believe in a failure: those cases are a phase of the second
tier.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "sim"))

from worker_cases import Phases, parameters_of

from residency_sim._build import build_extension

pytestmark = pytest.mark.sim

WORKER = Path(__file__).with_name("ranks_worker.py")
NUM_RANKS = {"one": 1, "two": 2, "waiting": 2, "four": 4, "dying": 2, "after": 1}
NEEDS = {"two": ("one",), "four": ("two",), "after": ("two", "dying")}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Phases:
    """What became of every case, by phase and rank."""
    build_extension()  # before processes are timed
    folder = tmp_path_factory.mktemp("ranks")
    return Phases(WORKER, folder, NUM_RANKS, needs=NEEDS, killed={"dying": (1,)})


@pytest.mark.parametrize(
    ("phase", "case"), parameters_of(WORKER, NUM_RANKS, whole=["waiting", "four"])
)
def test_ranks_save_and_restore(outcomes: Phases, phase: str, case: str) -> None:
    for rank, of_rank in enumerate(outcomes[phase]):
        assert of_rank.get(case) == "passed", f"rank {rank}: {of_rank.get(case)}"
