"""States that the tests of the storage writer and reader save, and how they compare them."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from residency.integrations.dcp import ResidencyStorageReader, ResidencyStorageWriter


def save(state: dict[str, Any], path: Path, **settings: Any) -> Path:
    dcp.save(state, storage_writer=ResidencyStorageWriter(path), **settings)
    return path


def load(state: dict[str, Any], path: Path, **settings: Any) -> dict[str, Any]:
    dcp.load(state, storage_reader=ResidencyStorageReader(path), **settings)
    return state


def blank(value: Any) -> Any:
    """Returns a state of the same structure, with nothing of the values."""
    if isinstance(value, Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: blank(each) for key, each in value.items()}
    if isinstance(value, list):
        return [blank(each) for each in value]
    return None


def is_same(found: Any, expected: Any) -> bool:
    """Compares types, values and, of tensors, bits."""
    if type(found) is not type(expected):
        return False
    if isinstance(expected, Tensor):
        if (found.dtype, found.shape) != (expected.dtype, expected.shape):
            return False
        return not found.numel() or torch.equal(raw(found), raw(expected))
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(is_same(found[k], expected[k]) for k in found)
    if isinstance(expected, list | tuple | deque):
        pairs = zip(found, expected, strict=False)
        return len(found) == len(expected) and all(is_same(a, b) for a, b in pairs)
    return bool(found == expected)


def raw(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def training_state() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(2, 3, 5, 5))  # changes the statistics
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return {
        "model": dict(model.state_dict()),
        "optimizer": {
            "state": {name: optimizer.state[p] for name, p in model.named_parameters()},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}, {"lr": 0.2, "foreach": None}],
        },
        "step": 7,
    }


def blank_of(value: Any) -> Any:
    return {key: dict(each) for key, each in value.items()}
