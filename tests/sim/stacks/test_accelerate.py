"""`accelerate` on the device: what its loop trains, saves and resumes has the CPU's bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.sim

AssertSame = Callable[[object, object], None]
Make = Callable[[], Any]


@pytest.fixture(scope="module")
def accelerate(framework: Callable[..., Any]) -> Any:
    return framework("accelerate")


@pytest.fixture
def start(
    accelerate: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """Makes an Accelerator on the device, or on the host; its state is one per process."""
    from accelerate.state import AcceleratorState

    def make(*, on_host: bool = False, **options: Any) -> Any:
        AcceleratorState._reset_state(True)
        if on_host:
            monkeypatch.delenv("ACCELERATE_TORCH_DEVICE", raising=False)
        else:
            monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", str(device))
        made = accelerate.Accelerator(cpu=on_host, **options)
        assert made.device.type == ("cpu" if on_host else "sim")
        return made

    yield make
    AcceleratorState._reset_state(True)


class Run:
    """A loop as accelerate's documentation writes it."""

    def __init__(self, accelerator: Any, make_reader: Make, text: torch.Tensor) -> None:
        self.accelerator = accelerator
        reader = make_reader()
        optimizer = torch.optim.AdamW(reader.parameters(), lr=1e-2, foreach=True)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        loader = DataLoader(TensorDataset(text), batch_size=4)
        self.reader, self.optimizer, self.loader, self.schedule = accelerator.prepare(
            reader, optimizer, loader, schedule
        )

    def train(self, first: int, last: int) -> list[float]:
        losses = []
        for step, (tokens,) in enumerate(self.loader):
            if not first <= step < last:
                continue
            assert tokens.device.type == self.accelerator.device.type
            with self.accelerator.accumulate(self.reader):
                output = self.reader(tokens[:, :-1]).flatten(0, 1)
                loss = torch.nn.functional.cross_entropy(output, tokens[:, 1:].flatten())
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.reader.parameters(), 0.5)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def states(self) -> list[Any]:
        return [self.reader.state_dict(), self.optimizer.state_dict()]


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_run_ends_at_the_cpu_s_bits(
    start: Callable[..., Any],
    make_reader: Make,
    text: torch.Tensor,
    assert_same: AssertSame,
    accumulated: int,
) -> None:
    ends = []
    for on_host in (True, False):
        accelerator = start(on_host=on_host, gradient_accumulation_steps=accumulated)
        run = Run(accelerator, make_reader, text)
        ends.append([run.train(0, 6), run.states()])
    assert_same(ends[1], ends[0])


def test_a_saved_state_resumes_to_the_bits_of_an_uninterrupted_run(
    start: Callable[..., Any],
    make_reader: Make,
    text: torch.Tensor,
    assert_same: AssertSame,
    tmp_path: Path,
) -> None:
    whole = Run(start(), make_reader, text)
    losses = whole.train(0, 3)
    whole.accelerator.save_state(str(tmp_path / "state"))
    losses += whole.train(3, 6)
    resumed = Run(start(), make_reader, text)
    resumed.accelerator.load_state(str(tmp_path / "state"))
    assert resumed.train(3, 6) == losses[3:]
    assert_same(resumed.states(), whole.states())
    moments = resumed.optimizer.state[next(iter(resumed.reader.parameters()))]["exp_avg"]
    assert moments.device.type == "sim"


def test_bf16_computes_what_autocast_computes_on_the_device(
    start: Callable[..., Any], make_reader: Make, text: torch.Tensor, assert_same: AssertSame
) -> None:
    # Not the CPU's bits: its autocast lists are others than CUDA's, which the device has.
    run = Run(start(mixed_precision="bf16"), make_reader, text)
    dtypes = []
    run.reader.heads.register_forward_hook(lambda *hooked: dtypes.append(hooked[2].dtype))
    losses = run.train(0, 3)
    assert set(dtypes) == {torch.bfloat16}

    reader = make_reader().to("sim")
    optimizer = torch.optim.AdamW(reader.parameters(), lr=1e-2, foreach=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    expected = []
    for step in range(3):
        tokens = text[4 * step : 4 * step + 4].to("sim")
        with torch.autocast("sim", dtype=torch.bfloat16):
            output = reader(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(
            output.float().flatten(0, 1), tokens[:, 1:].flatten()
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reader.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert losses == expected
    assert_same(run.reader.state_dict(), reader.state_dict())
