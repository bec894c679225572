"""Layers that train on the device as on the CPU, bit for bit: convolutions with their statistics,
and embeddings.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.sim

AssertSame = Callable[[object, object], None]

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "one dimension": (
        lambda: nn.Sequential(
            nn.Conv1d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm1d(8),
            nn.ReLU(),
            nn.MaxPool1d(2),
            nn.Conv1d(8, 4, 3, groups=4),
        ),
        (6, 3, 20),
    ),
    "two dimensions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.GELU(),
            nn.Conv2d(8, 8, 3, dilation=2, padding=2),
            nn.BatchNorm2d(8, momentum=None),
            nn.AdaptiveAvgPool2d(2),
        ),
        (4, 3, 12, 12),
    ),
    "transposed": (
        lambda: nn.Sequential(
            nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.ConvTranspose2d(6, 2, 2, groups=2),
        ),
        (3, 4, 5, 5),
    ),
    "three dimensions": (
        lambda: nn.Sequential(nn.Conv3d(2, 4, 3), nn.BatchNorm3d(4), nn.MaxPool3d(2)),
        (2, 2, 8, 8, 8),
    ),
}


def _train(
    module: nn.Module, make_loss: Callable[[nn.Module, int], torch.Tensor], num_steps: int = 3
) -> list[float]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = make_loss(module, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", NETWORKS)
def test_convolutions_with_batch_norm_train_and_evaluate(
    device: torch.device, name: str, assert_same: AssertSame
) -> None:
    make, shape = NETWORKS[name]
    runs = []
    for place in ("cpu", device):
        torch.manual_seed(0)
        network = make().to(place)

        def make_loss(module: nn.Module, step: int, place: object = place) -> torch.Tensor:
            batch = torch.randn(shape, generator=torch.Generator().manual_seed(step))
            output: torch.Tensor = module(batch.to(place))  # type: ignore[call-overload]
            return output.square().mean()

        losses = _train(network, make_loss)
        network.eval()
        runs.append([network.state_dict(), losses, make_loss(network, 9).item()])
    assert_same(runs[1], runs[0])
    assert runs[0][1][-1] != runs[0][1][0]


TOKENS = torch.tensor([[1, 3, 0, 3], [2, 0, 4, 1]])
STARTS = torch.tensor([0, 3, 3, 6])  # the second bag is empty
EMBEDDINGS: dict[str, tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...]]] = {
    "plain": (lambda: nn.Embedding(5, 6), (TOKENS,)),
    "with padding": (lambda: nn.Embedding(5, 6, padding_idx=0), (TOKENS,)),
    "scaled by frequency": (lambda: nn.Embedding(5, 6, scale_grad_by_freq=True), (TOKENS,)),
    "renormalised": (lambda: nn.Embedding(5, 6, max_norm=1.0), (TOKENS,)),
    "bags, summed": (lambda: nn.EmbeddingBag(5, 6, mode="sum"), (TOKENS,)),
    "bags, averaged": (lambda: nn.EmbeddingBag(5, 6, mode="mean"), (TOKENS,)),
    "bags, at most": (lambda: nn.EmbeddingBag(5, 6, mode="max"), (TOKENS,)),
    "bags with padding": (lambda: nn.EmbeddingBag(5, 6, padding_idx=0), (TOKENS,)),
    "bags with starts": (lambda: nn.EmbeddingBag(5, 6, mode="mean"), (TOKENS.flatten(), STARTS)),
}


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_embeddings_train(device: torch.device, name: str, assert_same: AssertSame) -> None:
    make, inputs = EMBEDDINGS[name]
    runs = []
    for place in ("cpu", device):
        torch.manual_seed(0)
        table = make().to(place)
        local = [tensor.to(place) for tensor in inputs]
        losses = _train(table, lambda module, step, local=local: module(*local).square().sum())
        gradient = table.weight.grad
        assert isinstance(gradient, torch.Tensor)
        runs.append([table.state_dict(), losses, gradient])
    assert_same(runs[1], runs[0])
