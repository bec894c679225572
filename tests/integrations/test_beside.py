"""Other packages that move bytes between host and device, in the same run as this one.

With trl 1.16.0, torchao 0.18.0 and peft 0.21.2 (2026-11-28).
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from limits import WORKER_SECONDS

import residency

sys.path.insert(0, str(Path(__file__).parents[1] / "sim"))

from worker_cases import cases_of, judge, run_cases

from residency.testing import simulated_device_type

HERE = Path(__file__).parent
WORKER = HERE / "beside_worker.py"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_cases(WORKER, tmp_path_factory.mktemp("beside"), "trl", "peft")


@pytest.mark.whole
@pytest.mark.timeout(2 * WORKER_SECONDS)
@pytest.mark.skipif(simulated_device_type() is None, reason="checks races")
@pytest.mark.parametrize("case", [name for _, name in cases_of(WORKER, {"case"})])
def test_beside(outcomes: dict[str, str], case: str) -> None:
    judge(outcomes.get(case))


def test_an_optimizer_of_deepspeeds_is_refused_with_its_own_setting() -> None:
    class DeepSpeedZeroOptimizer:
        __module__ = "deepspeed.runtime.zero.stage_1_and_2"

        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))])
    with pytest.raises(residency.InvalidArgumentError, match=r"zero_optimization\.offload_optim"):
        residency.offload_optimizer(DeepSpeedZeroOptimizer(inner))  # type: ignore[type-var]
