"""The wrapper for prime-rl, against a stand-in for its published interface.

The stand-in is `prime_rl_published.py`; `make test-projects` runs prime-rl's own code.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "sim"))

import prime_rl_published as prime_rl
from dcp_training import layers
from worker_cases import allocated_peak

from residency import InvalidArgumentError, OffloadedOptimizer, RefusedError
from residency.integrations.prime_rl import offload_built_by

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def offloading(setup: Any = prime_rl.setup_optimizer, **settings: Any) -> Any:
    return offload_built_by(setup, bucket="16KiB", **settings)


class Training:
    """Is a trainer's loop with what prime-rl saves."""

    def __init__(self, device: torch.device, setup: Any, kind: str = "adamw") -> None:
        self.device = device
        self.model = torch.nn.Sequential(*layers()).to(device)
        config = prime_rl.OptimizerConfig(kind)
        named = list(self.model.named_parameters())
        self.optimizer, self.manager = setup(config, named, None, cpu_offload=False, model=None)
        schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 0.5**n)
        progress = prime_rl.Progress()
        self.app = prime_rl.AppState(self.model, self.optimizer, schedule, progress)

    def train(self, steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)
            self.model(torch.randn(4, 64).to(self.device)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.app.scheduler.step()
            self.app.progress.step = step + 1

    def tensors(self) -> list[Tensor]:
        states = [v for p in self.model.parameters() for v in self.optimizer.state[p].values()]
        return [t.detach().cpu().clone() for t in [*self.model.parameters(), *states]]


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_resumed_run_is_the_uninterrupted_one_of_prime_rl(
    device: torch.device, kind: str, tmp_path: Path
) -> None:
    plain = Training(device, prime_rl.setup_optimizer, kind)
    plain.train(range(6))
    saved = Training(device, offloading(), kind)
    saved.train(range(3))
    prime_rl.save(saved.app, tmp_path)
    resumed = Training(device, offloading(), kind)
    parameter_bytes = sum(p.nbytes for p in resumed.model.parameters())
    # `AppState`: one copy of the parameters at most, no step with zero gradients, no state.
    peak = allocated_peak(lambda: prime_rl.load(resumed.app, tmp_path))
    assert peak <= parameter_bytes
    assert resumed.app.progress.step == 3
    assert resumed.optimizer.param_groups[0]["lr"] == 1e-2 * 0.5**3
    for training in (saved, resumed):
        training.train(range(3, 6))
        assert all(map(torch.equal, training.tensors(), plain.tensors()))


def test_it_returns_what_prime_rl_returned(device: torch.device) -> None:
    parameters = list(torch.nn.Linear(4, 4).to(device).named_parameters())
    config = prime_rl.OptimizerConfig()
    built = offloading()(config, parameters, None, cpu_offload=False, full_offload_config=None)
    optimizer, manager = built
    assert isinstance(optimizer, OffloadedOptimizer)
    assert manager is None
    older = offloading(prime_rl.setup_optimizer_before_3234)(config, parameters, None)
    assert isinstance(older, OffloadedOptimizer)
    assert isinstance(older, torch.optim.AdamW)


def test_the_settings_are_those_of_offload_optimizer(device: torch.device) -> None:
    parameters = list(torch.nn.Linear(64, 64).to(device).named_parameters())
    setup = offloading(resident="1MiB", slots=2)
    optimizer, _ = setup(prime_rl.OptimizerConfig(), parameters, None)
    assert optimizer.statistics().resident_bytes > 0
    with pytest.raises(InvalidArgumentError, match="bucket"):
        offload_built_by(prime_rl.setup_optimizer, bucket="12 GB")
    with pytest.raises(InvalidArgumentError, match=r"trainer.setup_optimizer = offload_built_by"):
        offload_built_by(prime_rl)


@pytest.mark.parametrize(
    ("argument", "setting"),
    [("cpu_offload", "model.optim_cpu_offload"), ("full_offload_config", "model.full_offload")],
)
def test_an_offload_of_prime_rls_own_is_refused_before_anything_is_built(
    argument: str, setting: str
) -> None:
    calls: list[object] = []

    def setup(config: object, named_params: object, **kwargs: object) -> None:
        calls.append(kwargs)

    with pytest.raises(RefusedError, match=f"{setting} is on.* set {setting} = false"):
        offloading(setup)(None, [], **{argument: True})
    assert calls == []


def test_what_prime_rl_offloaded_all_the_same_is_left_alone(device: torch.device) -> None:
    parameters = list(torch.nn.Linear(4, 4).to(device).named_parameters())
    config = prime_rl.OptimizerConfig()
    for setup in (prime_rl.setup_optimizer, prime_rl.setup_optimizer_before_3234):
        with pytest.raises(RefusedError, match=r"prime-rl .*built a CPUOffloadOptimizer.*left"):
            offloading(setup)(config, parameters, None, True)
    with pytest.raises(RefusedError, match=r"model.full_offload to false"):
        offloading()(config, parameters, None, False, True)


def test_a_prime_rl_that_returns_something_else_is_named(device: torch.device) -> None:
    def setup() -> object:
        return {"optimizer": None}

    with pytest.raises(RefusedError, match=r"prime-rl .*has no setup_optimizer that .*a dict"):
        offloading(setup)()
