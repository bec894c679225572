"""What the stacks train: a text of bytes, and a plain network that reads it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 256


@pytest.fixture(scope="module", autouse=True)
def _quick(quick_collections: None) -> None:
    """Freezes what was imported before every module's tests, also of those without a framework."""


@pytest.fixture
def text() -> torch.Tensor:
    """A source file of Python's own as ``int64`` ``[24, 16]``, a token per byte, on the host."""
    source = Path(argparse.__file__).read_bytes()
    return torch.frombuffer(bytearray(source[:384]), dtype=torch.uint8).long().view(24, 16)


class Reader(nn.Module):
    """Predicts the next byte by causal attention; every layer is a kernel that the CPU has too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.heads = nn.Linear(16, 48)
        self.norm = nn.LayerNorm(16)
        self.out = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        qkv = self.heads(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(*qkv, is_causal=True)
        return self.out(self.norm(x + y.transpose(1, 2).flatten(2)))

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@pytest.fixture
def make_reader() -> Callable[[], Reader]:
    """Makes the network on the host, each time with the same weights."""

    def make() -> Reader:
        torch.manual_seed(0)
        return Reader()

    return make


def _same(found: object, expected: object, where: str) -> None:
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), where
        assert found.dtype == expected.dtype, where
        ours, theirs = found.detach().cpu(), expected.detach().cpu()
        assert ours.shape == theirs.shape, where
        num_other = int((ours != theirs).sum())
        assert num_other == 0, f"{where}: {num_other} of {ours.numel()} differ: {ours - theirs}"
    elif isinstance(expected, dict):
        assert isinstance(found, dict), where
        assert list(found) == list(expected), where
        for key, value in expected.items():
            _same(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert isinstance(found, list | tuple), where
        assert len(found) == len(expected), where
        for index, value in enumerate(expected):
            _same(found[index], value, f"{where}[{index}]")
    else:
        assert found == expected, where


@pytest.fixture
def assert_same() -> Callable[[object, object], None]:
    """Demands two trees with the same structure and the same bits, wherever their tensors are."""
    return lambda found, expected: _same(_dict_of(found), _dict_of(expected), "")


def _dict_of(tree: object) -> object:
    """Returns the state dict of a module or an optimizer, and any other tree as it is."""
    return tree.state_dict() if isinstance(tree, nn.Module | torch.optim.Optimizer) else tree
