"""Makes the state that every case saves and loads: a model and AdamW with its state, on the host.

Layers of four matrices and two vectors, all float32, so that a gigabyte is some hundred tensors of
4 MiB and as many small ones, and a ``step`` for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

_WIDTH = 1024
_MATRICES = 4
_LAYER_BYTES = _MATRICES * _WIDTH * _WIDTH * 4


class Layer(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        for index in range(_MATRICES):
            matrix = torch.empty(_WIDTH, _WIDTH, device=device)
            self.register_parameter(f"matrix{index}", nn.Parameter(matrix))
        self.scale = nn.Parameter(torch.empty(_WIDTH, device=device))
        self.shift = nn.Parameter(torch.empty(_WIDTH, device=device))


class State(NamedTuple):
    model: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.flat().values())

    def named(self) -> dict[str, object]:
        """Returns what ``Checkpointer`` takes."""
        return {"model": self.model, "optimizer": self.optimizer}

    def flat(self) -> dict[str, Tensor]:
        """Returns what peers take: all tensors, under the names that are in a save of ours."""
        return dict(self._items())

    def _items(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield f"model.{name}", parameter.detach()
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                yield f"optimizer.state.{name}.{key}", value


def make_model(num_bytes: int, device: torch.device | None = None) -> nn.Module:
    """Makes a model of about that many bytes."""
    device = device or torch.device("cpu")
    num_layers = max(round(num_bytes / _LAYER_BYTES), 1)
    return nn.Sequential(*(Layer(device) for _ in range(num_layers)))


def make_state(num_bytes: int, device: torch.device | None = None) -> State:
    """Makes a state of about that many bytes: a third each for parameters and two moments."""
    model = make_model(num_bytes // 3, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.empty(()),
            "exp_avg": torch.empty_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.empty_like(parameter, requires_grad=False),
        }
    return State(model, optimizer)


def put_pattern(tensors: dict[str, Tensor], salt: int = 0) -> None:
    """Fills tensors with what ``check_pattern`` expects; writes every page."""
    for index, tensor in enumerate(tensors.values()):
        tensor.fill_(_first(index, salt))
        tensor.view(-1)[-1] = index + 0.5


def check_pattern(tensors: dict[str, Tensor], salt: int = 0) -> None:
    """Raises when a tensor does not begin and end as it should."""
    for index, (name, tensor) in enumerate(tensors.items()):
        flat = tensor.view(-1)
        expected = (_first(index, salt), index + 0.5)
        found = (float(flat[0]) if flat.numel() > 1 else expected[0], float(flat[-1]))
        if found != expected:
            raise SystemExit(f"{name} has {found} at its ends, expected {expected}")


def _first(index: int, salt: int) -> float:
    return float(index % 1000 + salt)
