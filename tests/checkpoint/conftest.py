"""A small run to save: layers with buffers, an optimizer plain or offloaded, a scheduler."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import residency
from residency._checkpoint._disk._publish import CheckpointDirectory

BUCKET = 4096


class Run:
    """Trains a normalised, tied network on its own random numbers."""

    def __init__(
        self,
        device: torch.device,
        *,
        offload: bool,
        kind: Any = torch.optim.AdamW,
        bucket: int = BUCKET,
    ) -> None:
        self.device = device
        self.generator = torch.Generator().manual_seed(7)
        torch.manual_seed(3)
        self.model = nn.Sequential(
            nn.Linear(16, 40), nn.BatchNorm1d(40), nn.Linear(40, 16), nn.Linear(16, 40)
        ).to(device)
        self.model[3].weight = self.model[0].weight
        settings = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        self.optimizer = kind(self.model.parameters(), lr=1e-2, **settings)
        if offload:
            residency.offload_optimizer(self.optimizer, bucket=bucket)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.extra = {"seen": 0, "best": float("inf"), "history": [1.5, (2, "b")]}

    @property
    def state(self) -> dict[str, Any]:
        return {**self.objects, "extra": self.extra}

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def forward(self) -> Tensor:
        x = torch.randn(8, 16, generator=self.generator).to(self.device)
        return self.model(x).square().mean()

    def step(self, *, closure: bool = False) -> None:
        if closure:
            self.optimizer.step(self._evaluate)
        else:
            self._evaluate()
            self.optimizer.step()
        self.scheduler.step()
        self.extra["seen"] += 1

    def _evaluate(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.forward()
        loss.backward()
        return loss

    def clones(self) -> dict[str, Any]:
        """Returns what a snapshot taken now must hold, read on the device in stream order; only
        state that lives on the host is waited for.
        """
        return cloned({**{n: v.state_dict() for n, v in self.objects.items()}, "extra": self.extra})

    def copy(self) -> dict[str, Any]:
        """Returns what a snapshot taken now must hold, read with waits for everything."""
        torch.accelerator.synchronize()
        return copied({**{n: v.state_dict() for n, v in self.objects.items()}, "extra": self.extra})


def copied(value: Any) -> Any:
    """Copies a nested value; tensors to the host."""
    return mapped(value, lambda tensor: tensor.detach().cpu().clone())


def cloned(value: Any) -> Any:
    """Copies a nested value; tensors where they are, on the current stream."""
    return mapped(value, lambda tensor: tensor.detach().clone())


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Copies a nested value, its tensors changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: mapped(each, change) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(mapped(each, change) for each in value)
    return value


def assert_same(found: Any, expected: Any, where: str = "tree") -> None:
    """Demands the same structure and the same bits, NaN equal to itself."""
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor), where
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        left, right = found.detach().cpu().contiguous(), expected.detach().cpu().contiguous()
        if left.numel():
            assert torch.equal(left.view(-1).view(torch.uint8), right.view(-1).view(torch.uint8)), (
                where
            )
    elif isinstance(expected, Mapping):
        assert set(found) == set(expected), where
        for key, value in expected.items():
            assert_same(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected), where
        assert len(found) == len(expected), where
        for index, value in enumerate(expected):
            assert_same(found[index], value, f"{where}[{index}]")
    else:
        assert type(found) is type(expected), where
        assert found == expected, where


@pytest.fixture
def lab(device: torch.device) -> SimpleNamespace:
    """Makes runs on the device under test, and compares trees."""

    def run(**settings: Any) -> Run:
        return Run(device, **settings)

    return SimpleNamespace(run=run, same=assert_same, copied=copied, device=device)


@pytest.fixture
def no_loans() -> Callable[[], bool]:
    """Says whether no host memory is lent to a save."""
    from residency._transfer import lending

    return lambda: not lending


@pytest.fixture
def held_writer(monkeypatch):
    """Holds every write until the event that it returns is set."""
    may_write = threading.Event()
    save = CheckpointDirectory.save

    def wait_and_save(self, request, **kwargs):
        may_write.wait(20)  # a test that fails must not hang
        return save(self, request, **kwargs)

    monkeypatch.setattr(CheckpointDirectory, "save", wait_and_save)
    yield may_write
    may_write.set()
