"""Optimizers of sharded parameters: FSDP2, HSDP, tensor parallelism, and their checkpoints.

``distributed_worker.py`` is one rank; it runs all cases of a phase, so that a phase costs one
start. A later phase reads the checkpoints of the ones before.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "sim"))

from worker_cases import cases_of, judge, missing_devices, run_phase, take_device

WORKER = Path(__file__).with_name("distributed_worker.py")
PHASES = {"first": 1, "second": 2, "last": 1, "four": 4}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    """What became of every case, by phase and rank; the simulator is built already."""
    take_device("1GiB")
    folder = tmp_path_factory.mktemp("ranks")
    return {
        phase: run_phase(WORKER, folder, phase, PHASES[phase])
        for phase in PHASES
        if missing_devices(_most_ranks(phase)) is None
    }


def _most_ranks(phase: str) -> int:
    """Returns how many ranks a phase has, or one that it reads the checkpoints of."""
    return max(PHASES[phase], PHASES["second"] if phase == "last" else 1)


@pytest.mark.parametrize(("phase", "case"), cases_of(WORKER, PHASES))
def test_sharded_optimizers(
    outcomes: dict[str, list[dict[str, str]]], phase: str, case: str
) -> None:
    if phase not in outcomes:
        judge(missing_devices(_most_ranks(phase)))
    for of_rank in outcomes[phase]:
        judge(of_rank.get(case))
