"""The hooks of an overlapped optimizer live as long as it does."""

from __future__ import annotations

import gc

import torch
from torch import nn
from torch.nn.modules import module as torchs_module

import residency


def test_an_optimizer_that_is_collected_in_a_cycle_leaves_no_hook(device: torch.device) -> None:
    gc.collect()  # those of tests before
    hooks_before = len(torchs_module._global_forward_pre_hooks)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    residency.offload_optimizer(optimizer, bucket="16KiB", overlap=True)
    for _ in range(3):
        model(torch.ones(2, 64, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    parameters = list(model.parameters())
    assert any(each._post_accumulate_grad_hooks for each in parameters)
    cycle: list[object] = [optimizer]
    cycle.append(cycle)
    del optimizer, cycle
    gc.collect()
    assert len(torchs_module._global_forward_pre_hooks) == hooks_before
    assert not any(each._post_accumulate_grad_hooks for each in parameters)
