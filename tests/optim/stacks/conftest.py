"""What the trainers train: a network whose parameters fill several buckets, and its rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

BUCKET = 2000  # both matrices are cut, the biases share a unit


class Net(nn.Module):
    """Learns to return its input; gives the loss as `transformers` wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 16))

    def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.body(rows) - rows).square().mean()}


@pytest.fixture
def make_net(device: torch.device) -> Callable[[], Net]:
    """Makes the network on the device, each time with the same weights."""

    def make() -> Net:
        torch.manual_seed(0)
        return Net().to(device)

    return make


@pytest.fixture
def rows() -> torch.Tensor:
    """Values of ``[24, 16]`` on the host."""
    return torch.randn(24, 16, generator=torch.Generator().manual_seed(5))
