"""Optimizers of a user's own, which keep what they go by in odd places: offloaded they end at the
same bits, or they are refused with nothing changed.
"""

from __future__ import annotations

import contextvars
import itertools
import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from training_programs import bits, noise, nothing_left, some

import residency

_count = contextvars.ContextVar("count", default=0)


class Places:
    """The places in which a class may count; each method returns how often it was asked."""

    everywhere = 0

    def __init__(self, chance: random.Random) -> None:
        self.seed = chance.randrange(1 << 20)
        self.kept = [0]

    def of_class(self, optimizer: Any) -> int:
        type(optimizer).calls = getattr(type(optimizer), "calls", 0) + 1
        return type(optimizer).calls

    def of_module(self, optimizer: Any) -> int:
        Places.everywhere += 1
        return Places.everywhere

    def of_closure(self, optimizer: Any) -> int:
        self.kept[0] += 1
        return self.kept[0]

    def of_object(self, optimizer: Any) -> int:
        optimizer.calls = vars(optimizer).get("calls", 0) + 1
        return int(optimizer.calls)

    def of_groups(self, optimizer: Any) -> int:
        for group in optimizer.param_groups:
            group["calls"] = group.get("calls", 0) + 1
        return int(group["calls"])

    def of_iterator(self, optimizer: Any) -> int:
        if "iterator" not in vars(optimizer):
            optimizer.iterator = itertools.count(1)
        return next(optimizer.iterator)

    def of_context(self, optimizer: Any) -> int:
        _count.set(_count.get() + 1)
        return _count.get()

    def of_tensor(self, optimizer: Any) -> int:
        if "tensor" not in vars(optimizer):
            optimizer.tensor = torch.zeros(())
        optimizer.tensor += 1
        return int(optimizer.tensor)

    def of_gradients(self, optimizer: Any) -> int:
        every = [each for group in optimizer.param_groups for each in group["params"]]
        return sum(each.grad is not None for each in every)

    def of_generator(self, optimizer: Any) -> int:
        if "drawing" not in vars(optimizer):
            optimizer.drawing = random.Random(self.seed)
        return int(optimizer.drawing.randrange(9))


COUNTS = [name for name in vars(Places) if name.startswith("of_")]
# What a parameter's rate is made of, besides the count.
RATES: dict[str, Callable[..., float]] = {
    "none": lambda optimizer, group, index, parameter: 1.0,
    "place": lambda optimizer, group, index, parameter: 0.9**index,
    "size": lambda optimizer, group, index, parameter: 1 / parameter.numel(),
    "others": lambda optimizer, group, index, parameter: 1 / len(group["params"]),
    "first group": lambda optimizer, group, index, parameter: optimizer.param_groups[0]["lr"],
    "attribute": lambda optimizer, group, index, parameter: 1 + getattr(parameter, "weight", 0),
}


def make_class(chance: random.Random) -> Callable[[], type[torch.optim.Optimizer]]:
    """Returns what makes a class anew, with nothing counted yet."""
    counts = chance.choice(COUNTS)
    rate, asks_each, waits = chance.choice(list(RATES)), some(chance, 0.3), chance.randint(1, 8)
    seed = chance.randrange(1 << 20)

    def made() -> type[torch.optim.Optimizer]:
        places = Places(random.Random(seed))
        Places.everywhere = 0
        _count.set(0)

        class Own(torch.optim.Optimizer):
            def __init__(self, parameters: Any, lr: float = 0.1) -> None:
                super().__init__(parameters, {"lr": lr})

            @torch.no_grad()
            def step(self, closure: Any = None) -> None:
                number = 0 if asks_each else getattr(places, counts)(self)
                for group in self.param_groups:
                    for index, each in enumerate(group["params"]):
                        if each.grad is None:
                            continue
                        if asks_each:
                            number = getattr(places, counts)(self)
                        state = self.state[each]
                        if not state:
                            state["momentum"] = torch.zeros_like(each)
                        state["momentum"].mul_(0.9).add_(each.grad)
                        factor = RATES[rate](self, group, index, each)
                        factor *= min(1.0, number / waits)
                        each.add_(state["momentum"], alpha=-group["lr"] * factor)

        return Own

    return made


def run(
    chance: random.Random, device: torch.device, kind: type[torch.optim.Optimizer], *, offload: bool
) -> list[Any]:
    shapes = [(chance.choice([1, 12, 40]), chance.choice([1, 12])) for _ in range(6)]
    start = [noise(index, each, torch.float32) for index, each in enumerate(shapes)]
    parameters = [torch.nn.Parameter(each.to(device)) for each in start]
    split = chance.randint(1, 5)
    groups = [{"params": parameters[:split]}, {"params": parameters[split:], "lr": 0.05}]
    optimizer = kind(groups)
    bucket = chance.choice(["1KiB", "64KiB"])
    if offload:
        residency.offload_optimizer(optimizer, bucket=bucket)
    for step in range(12):
        for index, each in enumerate(parameters):
            values = noise(100 * step + index, shapes[index], torch.float32)
            each.grad = values.to(device) if some(chance, 0.85) else None
        optimizer.step()
    return [bits(each) for each in parameters]


@pytest.mark.sim_device(capacity=96 << 20)
def test_a_class_of_ones_own_steps_to_the_same_bits_or_is_refused(
    sim_device: torch.device, torture: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)

    def judge(chance: random.Random) -> None:
        made, seed = make_class(chance), chance.randrange(1 << 30)
        with nothing_left(chance):
            stock = run(random.Random(seed), sim_device, made(), offload=False)
            try:
                ours = run(random.Random(seed), sim_device, made(), offload=True)
            except residency.RefusedError:
                return
            except residency.ResidencyError as error:
                if "cannot be stepped in parts" in str(error):  # by a first step
                    return
                raise
            assert ours == stock

    torture(judge)
