"""On a device that shares the host's memory, what frees nothing is refused unless it is wanted."""

from __future__ import annotations

import pytest
import torch

import residency
from residency import _device


@pytest.fixture
def integrated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_device, "shares_host_memory", lambda device: True)


def trained(device: torch.device) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(8, 8).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8, device=device)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_an_offload_and_a_parking_are_refused_with_nothing_changed(device, integrated):
    model, optimizer = trained(device)
    with pytest.raises(residency.RefusedError, match=r"shares the host's memory.*this AdamW would"):
        residency.offload_optimizer(optimizer)
    assert type(optimizer) is torch.optim.AdamW
    for owner in (model, optimizer):
        with pytest.raises(residency.RefusedError, match="shares the host's memory"):
            residency.park(owner)
    assert all(parameter.device == device for parameter in model.parameters())
    state = residency.snapshot({"model": model}).tree
    assert torch.equal(state["model"]["weight"], model.weight.detach().cpu())


def test_whoever_asks_for_it_gets_it(device, integrated, monkeypatch):
    monkeypatch.setenv("RESIDENCY_ON_SHARED_MEMORY", "1")
    model, optimizer = trained(device)
    residency.offload_optimizer(optimizer)
    assert residency.park(model) > 0
    residency.unpark(model)
    residency.onload_optimizer(optimizer)


def test_the_simulated_accelerator_and_a_card_have_memory_of_their_own(device):
    assert not _device.shares_host_memory(device)
    assert _device.shares_host_memory(torch.device("mps"))
