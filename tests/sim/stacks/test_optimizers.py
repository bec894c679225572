"""Torch's optimizers on the device: each implementation ends at the CPU's bits, and state dicts
travel between the two.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.sim

AssertSame = Callable[[object, object], None]

IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "default": {},
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "Adam": (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.1}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.1}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.9, "centered": True}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
}
HAVE_FUSED = {"Adagrad", "Adam", "AdamW", "SGD"}
CASES = [
    (name, implementation)
    for name in OPTIMIZERS
    for implementation in IMPLEMENTATIONS
    if implementation != "fused" or name in HAVE_FUSED
]


def _module(place: object) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(30, 40), nn.LayerNorm(40), nn.Linear(40, 1, bias=False)]
    return nn.Sequential(*layers).to(place)  # type: ignore[call-overload,no-any-return]


def _step(module: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        for index, parameter in enumerate(module.parameters()):
            generator = torch.Generator().manual_seed(100 * step + index)
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient.to(parameter.device)
        optimizer.step()


def _make(name: str, implementation: str, module: nn.Module) -> torch.optim.Optimizer:
    kind, options = OPTIMIZERS[name]
    return kind(module.parameters(), **options, **IMPLEMENTATIONS[implementation])


@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_an_optimizer_ends_at_the_cpu_s_bits(
    device: torch.device, name: str, implementation: str, assert_same: AssertSame
) -> None:
    runs = []
    for place in ("cpu", device):
        module = _module(place)
        # On the CPU torch's default is the loop, whose arithmetic differs for some.
        same = "foreach" if (implementation, place) == ("default", "cpu") else implementation
        optimizer = _make(name, same, module)
        _step(module, optimizer, 0, 3)
        runs.append([module.state_dict(), optimizer.state_dict()["state"]])
    assert_same(runs[1], runs[0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_state_dict_travels_between_the_device_and_the_cpu(
    device: torch.device, implementation: str, assert_same: AssertSame
) -> None:
    whole = _module("cpu")
    optimizer = _make("AdamW", implementation, whole)
    _step(whole, optimizer, 0, 2)
    middle = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
    _step(whole, optimizer, 2, 4)
    ends = copy.deepcopy((whole.state_dict(), optimizer.state_dict()["state"]))
    for start, end in (("cpu", device), (device, "cpu"), (device, device)):
        # On `start` up to the middle, on `end` from there.
        module = _module(start)
        before = _make("AdamW", implementation, module)
        _step(module, before, 0, 2)
        assert_same((module.state_dict(), before.state_dict()), middle)
        other = _module(end)
        after = _make("AdamW", implementation, other)
        other.load_state_dict(module.state_dict())
        after.load_state_dict(before.state_dict())
        moments = after.state[next(other.parameters())]["exp_avg"]
        assert moments.device.type == torch.device(end).type
        _step(other, after, 2, 4)
        assert_same((other.state_dict(), after.state_dict()["state"]), ends)


def test_a_gradient_norm_is_clipped_to_the_cpu_s_bits(device: torch.device) -> None:
    norms, gradients = [], []
    for place in ("cpu", device):
        module = _module(place)
        _step(module, torch.optim.SGD(module.parameters(), lr=0.0), 0, 1)
        for foreach in (None, False):
            norm = nn.utils.clip_grad_norm_(module.parameters(), 0.5, foreach=foreach)
            norms.append(norm.item())
        gradients.append([p.grad.cpu() for p in module.parameters() if p.grad is not None])
    assert norms[2:] == norms[:2]
    assert norms[0] > 0.5
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_closure_is_called_by_lbfgs_as_on_the_cpu(
    device: torch.device, assert_same: AssertSame
) -> None:
    runs = []
    for place in ("cpu", device):
        module = _module(place)
        optimizer = torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=4)
        batch = torch.linspace(-1, 1, 60).view(2, 30).to(place)  # type: ignore[call-overload]
        calls = []

        def closure(
            module: nn.Module = module, batch: torch.Tensor = batch, calls: list[float] = calls
        ) -> torch.Tensor:
            module.zero_grad()
            loss: torch.Tensor = module(batch).square().sum()
            loss.backward()
            calls.append(loss.item())
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]
        runs.append([module.state_dict(), calls])
    assert_same(runs[1], runs[0])
    assert len(runs[0][1]) > 1
