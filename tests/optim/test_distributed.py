"""Optimizers of sharded parameters: FSDP2, HSDP, tensor parallelism, and their checkpoints.

``distributed_worker.py`` is one rank; it runs all cases of a phase, so that a phase costs one
start. A later phase reads the checkpoints of the ones before.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "sim"))

from worker_cases import Phases, judge, missing_devices, parameters_of, take_device

WORKER = Path(__file__).with_name("distributed_worker.py")
NUM_RANKS = {"first": 1, "pair": 2, "second": 2, "last": 1, "four": 4}
NEEDS = {"second": ("first",), "last": ("second",)}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Phases:
    """What became of every case, by phase and rank; the simulator is built already."""
    take_device("1GiB")
    return Phases(WORKER, tmp_path_factory.mktemp("ranks"), NUM_RANKS, needs=NEEDS)


def _most_ranks(phase: str) -> int:
    """Returns how many ranks a phase has, or one that it reads the checkpoints of."""
    return max(NUM_RANKS[phase], NUM_RANKS["second"] if phase == "last" else 1)


@pytest.mark.parametrize(("phase", "case"), parameters_of(WORKER, NUM_RANKS, whole=["four"]))
def test_sharded_optimizers(outcomes: Phases, phase: str, case: str) -> None:
    if (reason := missing_devices(_most_ranks(phase))) is not None:
        judge(reason)
    for of_rank in outcomes[phase]:
        judge(of_rank.get(case))
