"""Steps float32 masters by hand, beside an offloaded optimizer that has masters of its own."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from training_programs import bits, noise, nothing_left, same, some

import residency


def masters(chance: random.Random, device: torch.device) -> None:
    """Steps float32 masters by hand, beside an optimizer that has its own."""
    name = chance.choice(["AdamW", "Adam", "SGD", "RMSprop", "Adagrad", "Adamax", "NAdam", "RAdam"])
    settings: dict[str, Any] = {"lr": 0.01, "foreach": chance.choice([True, False, None])}
    if name in {"SGD", "RMSprop"}:
        settings["momentum"] = 0.9
    shapes = [(chance.choice([1, 17, 300]), chance.choice([1, 9, 64])) for _ in range(4)]
    kinds = [chance.choice([torch.bfloat16, torch.float16, torch.float32]) for _ in shapes]
    start = [noise(chance.randrange(1 << 30), *each) for each in zip(shapes, kinds, strict=True)]
    parameters = [torch.nn.Parameter(each.to(device)) for each in start]
    by_hand = [torch.nn.Parameter(each.float().to(device)) for each in start]
    stock = getattr(torch.optim, name)(by_hand, **settings)

    def offloaded() -> Any:
        made = getattr(torch.optim, name)(parameters, **settings)
        options = {"bucket": chance.choice([4096, "64KiB"]), "slots": chance.randint(1, 3)}
        resident = chance.choice([0, 0, 5000, "1MiB"])
        return residency.offload_optimizer(
            made, **options, resident=resident, pin=some(chance, 0.7), master_weights=True
        )

    optimizer = offloaded()
    for _ in range(chance.randint(2, 7)):
        for index, (mine, theirs) in enumerate(zip(parameters, by_hand, strict=True)):
            mine.grad = theirs.grad = None
            if some(chance, 0.8):
                values = noise(chance.randrange(1 << 30), shapes[index], kinds[index])
                mine.grad, theirs.grad = values.to(device), values.float().to(device)
        if some(chance, 0.2):
            loaded = copy.deepcopy(optimizer.state_dict())
            optimizer = offloaded()
            optimizer.load_state_dict(loaded)
        optimizer.step()
        stock.step()
        for index, (mine, theirs) in enumerate(zip(parameters, by_hand, strict=True)):
            assert bits(mine) == bits(theirs.to(kinds[index])), (name, settings, index)
            state = dict(optimizer.state.get(mine, {}))
            if "master_weight" in state:
                same(state.pop("master_weight"), theirs.data, f"master {index}")
            same(state, dict(stock.state.get(theirs, {})), f"state {index} of {name}")


@pytest.mark.sim_device(capacity=96 << 20)
def test_masters_are_those_that_are_stepped_by_hand(
    sim_device: torch.device, torture: Callable[..., None]
) -> None:
    def judge(chance: random.Random) -> None:
        with nothing_left(chance):
            masters(chance, sim_device)

    torture(judge)
