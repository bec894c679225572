"""States that a parameter has not yet, and values that groups share, beside a `TrainState`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import residency
from residency.integrations.dcp import TrainState

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
CLASSES = {  # some take zeros for a state that stops a parameter
    "Rprop": torch.optim.Rprop,
    "NAdam": torch.optim.NAdam,
    "ASGD": torch.optim.ASGD,
    "SGD": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, dampening=0.5),
    "AdamW": torch.optim.AdamW,
}


def _trained(device: Any, name: str, between: str) -> tuple[torch.Tensor, Any]:
    """Returns a bias that has no gradient at first, and what the optimizer said of its state."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1, device=device)
    optimizer = CLASSES[name](model.parameters(), lr=0.01)
    if between:
        residency.offload_optimizer(optimizer)

    def step(*, has_bias: bool) -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 1, device=device)).square().sum().backward()
        if not has_bias:
            model.bias.grad = None
        optimizer.step()

    step(has_bias=False)
    if between == "saved":
        TrainState(model, optimizer).state_dict()
    elif between == "primed":
        optimizer.prime()
    said = optimizer.state_dict()["state"].get(1)
    if between:
        residency.onload_optimizer(optimizer)
    for _ in range(3):
        step(has_bias=True)
    return model.bias.detach().cpu(), said


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("between", ["offloaded", "saved", "primed"])
def test_a_template_is_no_state(device: torch.device, name: str, between: str) -> None:
    expected, _ = _trained(device, name, "")
    found, said = _trained(device, name, between)
    assert torch.equal(found, expected)
    assert (said is not None) is (between == "primed")


@pytest.mark.parametrize("offload", [False, True])
def test_groups_that_share_a_rate_share_it_after_a_load(
    device: torch.device, tmp_path: Path, offload: bool
) -> None:
    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(2, 2, device=device)
        groups = [{"params": [each]} for each in model.parameters()]
        optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.1))
        if offload:
            residency.offload_optimizer(optimizer)
        model(torch.ones(1, 2, device=device)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = made()
    optimizer.param_groups[0]["lr"].fill_(0.025)
    dcp.save({"app": TrainState(model, optimizer)}, checkpoint_id=tmp_path)
    model, optimizer = made()
    dcp.load({"app": TrainState(model, optimizer)}, checkpoint_id=tmp_path)
    first, second = (group["lr"] for group in optimizer.param_groups)
    assert first is second
    assert first.item() == pytest.approx(0.025)


def test_an_offloaded_optimizer_of_a_model_on_the_host_is_saved(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = residency.offload_optimizer(torch.optim.AdamW(model.parameters()))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before = optimizer.state[model.weight]["exp_avg"].clone()
    dcp.save({"app": TrainState(model, optimizer)}, checkpoint_id=tmp_path)
    optimizer.state[model.weight]["exp_avg"].zero_()
    dcp.load({"app": TrainState(model, optimizer)}, checkpoint_id=tmp_path)
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], before)
