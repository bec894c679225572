"""Loads, saves and restores while a model is parked, wholly or in part; stock torch, which never
parks, is the judge."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import residency

TORCHS = Optimizer.__setstate__


class Lists(Optimizer):
    """Keeps tensors in a list, and a number on the host beside them."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    last = [*state.get("last", ())[-1:], parameter.grad.clone()]
                    state["last"], state["step"] = last, state.get("step", torch.zeros(())) + 1
                    parameter.sub_(torch.stack(last).mean(0), alpha=group["lr"])


KINDS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "lists": Lists,
}


def made(device: torch.device, kind: str) -> tuple[torch.nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 9)).to(device)
    return model, KINDS[kind](model.parameters())


def step(model: torch.nn.Module, optimizer: Optimizer, number: int) -> None:
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 0.1 * number + index)
    optimizer.step()
    optimizer.zero_grad()


def read(model: torch.nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
    found = [p.detach().cpu() for p in model.parameters()]
    for parameter in model.parameters():
        for value in dict(optimizer.state[parameter]).values():
            each = value if isinstance(value, list) else [value]
            found += [v.detach().cpu() for v in each]
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("need", [None, "2KiB"], ids=["wholly", "in part"])
def test_a_state_that_is_loaded_meanwhile_follows_its_parameters(
    device: torch.device, kind: str, need: str | None
) -> None:
    results = []
    for parks in (False, True):
        model, optimizer = made(device, kind)
        step(model, optimizer, 1)
        saved = copy.deepcopy(optimizer.state_dict())
        step(model, optimizer, 2)
        if parks:
            residency.park(model, need=need)
        optimizer.load_state_dict(saved)
        if parks:
            residency.unpark(model)
        places = [
            each.device.type
            for parameter in model.parameters()
            for value in optimizer.state[parameter].values()
            for each in (value if isinstance(value, list) else [value])
        ]
        step(model, optimizer, 3)
        results.append((places, read(model, optimizer)))
    assert results[0][0] == results[1][0]
    assert all(map(torch.equal, results[0][1], results[1][1]))
    assert Optimizer.__setstate__ is TORCHS


@pytest.mark.parametrize("seed", range(10))
def test_random_programs_with_parkings_have_the_bits_of_those_without(
    device: torch.device, tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    kind = draw.choice([*KINDS][:3] if seed % 2 else [*KINDS])
    program = draw.choices(("park", "part", "unpark", "save", "restore", "load", "step"), k=14)
    results = []
    for parks in (False, True):
        model, optimizer = made(device, kind)
        if parks and seed % 2:
            residency.offload_optimizer(optimizer, bucket="8KiB")
        step(model, optimizer, 0)
        state = {"model": model, "optimizer": optimizer}
        loaded = copy.deepcopy(optimizer.state_dict())
        is_parked, is_saved = False, False
        with residency.Checkpointer(tmp_path / str(parks), keep=1) as checkpointer:
            for number, action in enumerate((*program, "unpark", "step"), 1):
                if action in ("park", "part") and parks and not is_parked:
                    residency.park(model, need="2KiB" if action == "part" else None)
                    is_parked = True
                elif action in ("unpark", "step") and is_parked:
                    residency.unpark(model)
                    is_parked = False
                elif action == "save":
                    checkpointer.save(number, state).wait()
                    is_saved = True
                elif action == "restore" and is_saved:
                    checkpointer.restore(state)
                elif action == "load":
                    optimizer.load_state_dict(copy.deepcopy(loaded))
                if action == "step":
                    step(model, optimizer, number)
        results.append(read(model, optimizer))
    assert len(results[0]) == len(results[1])
    assert all(map(torch.equal, *results)), (kind, program)


def test_what_is_parked_in_part_is_named_where_an_offload_begins(device: torch.device) -> None:
    model, optimizer = made(device, "adamw")
    residency.park(model, need="2KiB")
    with pytest.raises(residency.RefusedError, match=r"parked: call residency\.unpark first"):
        residency.offload_optimizer(optimizer)
    residency.unpark(model)
    residency.offload_optimizer(optimizer)
