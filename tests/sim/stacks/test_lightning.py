"""Lightning's Trainer on the device, by an accelerator class of a few lines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

AssertSame = Callable[[object, object], None]
Make = Callable[[], Any]
Fit = Callable[..., tuple[Any, Any]]

pytestmark = [
    pytest.mark.sim,
    # Lightning asks torch's pytree in a way that torch 2.13 gives up.
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    # Advice of Lightning's on workers and logging, which a run of four steps does not need.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]


@pytest.fixture(scope="module")
def lightning(framework: Callable[..., Any]) -> Any:
    return framework("lightning.pytorch")


@pytest.fixture(scope="module")
def make_accelerator(lightning: Any) -> Callable[[], Any]:
    class SimulatedAccelerator(lightning.accelerators.Accelerator):
        """All that Lightning asks of a device."""

        def setup_device(self, device: torch.device) -> None:
            torch.accelerator.set_device_index(device)

        def teardown(self) -> None:
            torch.accelerator.empty_cache()

        @staticmethod
        def parse_devices(devices: Any) -> Any:
            return devices

        @staticmethod
        def get_parallel_devices(devices: int) -> list[torch.device]:
            return [torch.device("sim", index) for index in range(devices)]

        @staticmethod
        def auto_device_count() -> int:
            return torch.accelerator.device_count()

        @staticmethod
        def is_available() -> bool:
            return torch.accelerator.is_available()

        @staticmethod
        def name() -> str:
            return "sim"

        def get_device_stats(self, device: Any) -> dict[str, Any]:
            return dict(torch.accelerator.memory_stats(device))

    return SimulatedAccelerator


@pytest.fixture(scope="module")
def make_module(lightning: Any) -> Callable[[Any], Any]:
    class Module(lightning.LightningModule):
        def __init__(self, reader: Any) -> None:
            super().__init__()
            self.reader = reader
            self.losses: list[float] = []
            self.dtypes: set[torch.dtype] = set()
            reader.heads.register_forward_hook(lambda *hooked: self.dtypes.add(hooked[2].dtype))

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            assert batch[0].device.type == self.reader.out.weight.device.type == self.device.type
            loss: torch.Tensor = self.reader.loss(batch[0])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2, foreach=True)

    return Module


@pytest.fixture
def fit(
    lightning: Any,
    make_accelerator: Callable[[], Any],
    make_module: Callable[[Any], Any],
    device: torch.device,
    make_reader: Make,
    text: torch.Tensor,
    tmp_path: Path,
) -> Fit:
    from lightning.pytorch.plugins.precision import MixedPrecision
    from lightning.pytorch.strategies import SingleDeviceStrategy

    def fit(
        *,
        place: str = "sim",
        epochs: int = 2,
        resume: Path | None = None,
        is_mixed: bool = False,
    ) -> tuple[Any, Any]:
        # `precision="bf16-mixed"` would be CUDA's autocast: Lightning knows that and the CPU's.
        kind = make_accelerator() if place == "sim" else None
        where = (
            {"strategy": SingleDeviceStrategy(device=str(device), accelerator=kind)}
            if kind
            else {"accelerator": "cpu"}
        )
        trainer = lightning.Trainer(
            max_epochs=epochs,
            gradient_clip_val=0.5,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            **where,
            **({"plugins": [MixedPrecision("bf16-mixed", str(device.type))]} if is_mixed else {}),
        )
        module = make_module(make_reader())
        loader = DataLoader(TensorDataset(text[:8]), batch_size=4)  # an epoch is two steps
        trainer.fit(module, loader, ckpt_path=resume)
        return module, trainer

    return fit


def _states(fitted: tuple[Any, Any]) -> list[Any]:
    module, trainer = fitted
    return [module.losses, module.state_dict(), trainer.optimizers[0].state_dict()]


def test_a_run_ends_at_the_cpu_s_bits(fit: Fit, assert_same: AssertSame) -> None:
    found, expected = fit(), fit(place="cpu")
    assert found[0].losses[-1] < found[0].losses[0]
    assert_same(_states(found), _states(expected))


@pytest.mark.parametrize("is_mixed", [False, True], ids=["32", "bf16-mixed"])
def test_a_checkpoint_resumes_to_the_bits_of_an_uninterrupted_run(
    fit: Fit,
    assert_same: AssertSame,
    tmp_path: Path,
    is_mixed: bool,
) -> None:
    whole = fit(is_mixed=is_mixed)
    _, trainer = fit(is_mixed=is_mixed, epochs=1)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    resumed = fit(is_mixed=is_mixed, resume=tmp_path / "run.ckpt")
    assert resumed[0].dtypes == {torch.bfloat16 if is_mixed else torch.float32}
    assert resumed[0].losses == whole[0].losses[2:]
    assert_same(_states(resumed)[1:], _states(whole)[1:])


def test_mixed_precision_computes_what_autocast_computes_on_the_device(
    fit: Fit,
    make_reader: Make,
    text: torch.Tensor,
    assert_same: AssertSame,
) -> None:
    # Not the CPU's bits: its autocast lists are others than CUDA's, which the device has.
    module, _ = fit(is_mixed=True)
    reader = make_reader().to("sim")
    optimizer = torch.optim.AdamW(reader.parameters(), lr=1e-2, foreach=True)
    losses = []
    for step in (0, 1, 0, 1):
        with torch.autocast("sim", dtype=torch.bfloat16):
            loss = reader.loss(text[4 * step : 4 * step + 4].to("sim"))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reader.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    assert module.losses == losses
    assert_same(module.reader.state_dict(), reader.state_dict())
