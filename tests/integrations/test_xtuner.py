"""The config for XTuner, against a stand-in for its published interface (`xtuner_published.py`).

XTuner's own engine, with this config and with ``SwapAdamW``, runs by `make test-projects`.
That the steps themselves have torch's bits, over all settings of AdamW, is in ``tests/optim``
(`test_parity.py`, `test_properties.py`); FSDP2 is in `dcp_training_worker.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "sim"))

import xtuner_published
from dcp_training import layers
from worker_cases import allocated_peak

from residency import InvalidArgumentError, OffloadedOptimizer, RefusedError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def published() -> Iterator[ModuleType]:
    yield xtuner_published.install()
    xtuner_published.uninstall()


def config(**settings: Any) -> Any:
    from residency.integrations.xtuner import OffloadedAdamWConfig

    return OffloadedAdamWConfig(lr=1e-2, bucket="16KiB", **settings)


def model_on(device: torch.device) -> Any:
    return xtuner_published.Model(*layers()).to(device)


class Training:
    """Is an engine with a schedule, as XTuner's trainer has them."""

    def __init__(self, device: torch.device, optim_cfg: Any) -> None:
        self.device = device
        self.engine = xtuner_published.TrainEngine(model_on(device), optim_cfg)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.engine.optimizer, lambda n: 0.5**n)

    def train(self, steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)
            self.engine.model(torch.randn(4, 64).to(self.device)).square().sum().backward()
            self.engine.optimizer.step()
            self.engine.optimizer.zero_grad()
            self.schedule.step()

    def tensors(self) -> list[Tensor]:
        parameters = list(self.engine.model.parameters())
        states = [v for p in parameters for v in self.engine.optimizer.state[p].values()]
        return [t.detach().cpu().clone() for t in [*parameters, *states]]


def test_the_config_is_one_of_xtuners_and_builds_what_xtuner_would(
    device: torch.device, published: ModuleType
) -> None:
    made = config(weight_decay=0.1, betas=(0.8, 0.9), foreach=True)
    assert isinstance(made, published.AdamWConfig)
    assert published.TrainerConfig(optim_cfg=made).optim_cfg is made
    model = model_on(device)
    next(model.parameters()).requires_grad_(False)
    optimizer = made.build(model)
    plain = published.AdamWConfig(lr=1e-2, weight_decay=0.1, betas=(0.8, 0.9), foreach=True)
    expected = plain.build(model)
    assert isinstance(optimizer, OffloadedOptimizer)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert repr(optimizer.param_groups) == repr(expected.param_groups)
    assert repr(optimizer.defaults) == repr(expected.defaults)
    states = [v for values in optimizer.state.values() for v in values.values()]
    assert states
    assert all(v.is_cpu for v in states)


def test_settings_are_checked(device: torch.device, published: ModuleType) -> None:
    for settings in ({"swap_optimizer": False}, {"swap": True}, {"slots": "many"}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            config(**settings)
    with pytest.raises(InvalidArgumentError, match="resident"):
        config(resident="much").build(model_on(device))


def test_xtuners_own_movers_leave_the_optimizer_alone(
    device: torch.device, published: ModuleType
) -> None:
    training = Training(device, config())
    training.train(range(1))
    before = torch.accelerator.memory_allocated()
    assert not training.engine.put_optimizer_to_device(device)
    assert torch.accelerator.memory_allocated() == before


def test_a_resumed_run_is_the_uninterrupted_one_with_its_schedule(
    device: torch.device, published: ModuleType, tmp_path: Path
) -> None:
    """What ``SwapAdamW`` fails: it steps on at the rate of its construction."""
    plain = Training(device, published.AdamWConfig(lr=1e-2))
    plain.train(range(6))
    saved = Training(device, config())
    saved.train(range(3))
    saved.engine.save_dcp(tmp_path)
    resumed = Training(device, config())
    parameter_bytes = sum(p.nbytes for p in resumed.engine.model.parameters())
    # XTuner's own `load_dcp`: a copy of the parameters on the host, nothing on the device.
    assert allocated_peak(lambda: resumed.engine.load_dcp(tmp_path)) < parameter_bytes
    assert resumed.engine.optimizer.param_groups[0]["lr"] == 1e-2 * 0.5**3
    resumed.schedule.load_state_dict(saved.schedule.state_dict())
    for training in (saved, resumed):
        training.train(range(3, 6))
        assert all(map(torch.equal, training.tensors(), plain.tensors()))
        assert training.schedule.get_last_lr() == plain.schedule.get_last_lr()


def test_without_xtuner_the_error_says_where_to_get_it() -> None:
    assert "xtuner" not in sys.modules
    with pytest.raises(ImportError, match=r"pip install git\+https://github.com/InternLM/xtuner"):
        config()


def test_a_version_without_the_switch_is_refused(
    published: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "AdamWConfig", published.OptimConfig)
    with pytest.raises(RefusedError, match=r"xtuner .* has no AdamWConfig.swap_optimizer"):
        config()


def test_an_optimizer_that_something_else_offloads_is_refused(
    device: torch.device, published: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import residency

    build = published.AdamWConfig.build
    monkeypatch.setattr(
        published.AdamWConfig,
        "build",
        lambda self, model: residency.offload_optimizer(build(self, model)),
    )
    with pytest.raises(RefusedError, match="something else offloads its optimizers"):
        config().build(model_on(device))
