"""Trains with states that are assigned from one another, beside the same training on stock torch.

A state is given another parameter's, a view of it, or a window of a tensor that another state is a
window of, too. An assignment gives the value and ties nothing, so stock torch is given a copy.
Snapshots are taken while steps go on.
"""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from training_programs import host_copy, noise, nothing_left, same, some

import residency

CLASSES: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "Adam": {"amsgrad": True},
    "SGD": {"momentum": 0.9, "nesterov": True},
    "RMSprop": {"centered": True, "momentum": 0.5},
    "Adagrad": {},
    "Adamax": {},
}


class World:
    """One of the two runs."""

    def __init__(self, seed: int, device: torch.device, *, is_stock: bool) -> None:
        self.is_stock = is_stock
        chance = random.Random(seed)
        name = chance.choice(list(CLASSES))
        self.dtype = chance.choice([torch.float32, torch.float64])
        self.shapes = [chance.choice([(64,), (8, 16), (300,), (3, 700)]) for _ in range(5)]
        self.parameters = [
            torch.nn.Parameter(noise(chance.randrange(1 << 30), each, self.dtype).to(device))
            for each in self.shapes
        ]
        settings = CLASSES[name] | {"lr": 0.01, "foreach": chance.choice([True, False])}
        self.device = device
        self.optimizer: Any = getattr(torch.optim, name)(self.parameters, **settings)

    def step(self, seed: int, *, all_have: bool = False) -> None:
        chance = random.Random(seed)
        for parameter in self.parameters:
            parameter.grad = None
            drawn = noise(chance.randrange(1 << 30), tuple(parameter.shape), self.dtype)
            if all_have or chance.random() < 0.8:
                parameter.grad = drawn.to(self.device)
        self.optimizer.step()

    def states(self) -> Iterator[tuple[dict[str, Any], str]]:
        for parameter in self.parameters:
            for key in list(self.optimizer.state[parameter]):
                if key != "step":
                    yield self.optimizer.state[parameter], key

    def given(self, value: torch.Tensor) -> torch.Tensor:
        """Returns a value to assign."""
        return value.clone() if self.is_stock else value

    def give(self, seed: int) -> None:
        """Assigns a state, or a part of it, to another entry; or exchanges two."""
        chance = random.Random(seed)
        (first, one), (second, two) = chance.sample(list(self.states()), 2)
        small, large = first[one], second[two]
        if small.numel() > large.numel():
            (first, one, small), (second, two, large) = (second, two, large), (first, one, small)
        how = chance.choice(["whole", "exchanged", "view", "windows"])
        if how == "exchanged" and small.shape == large.shape:
            first[one], second[two] = large, small
        elif how in ("whole", "exchanged") and small.shape == large.shape:
            first[one] = self.given(large)
        elif how != "windows":
            start = chance.randint(0, large.numel() - small.numel())
            part = large.view(-1)[start : start + small.numel()].view(small.shape)
            first[one] = self.given(part)
        else:
            common = chance.randint(1, small.numel())
            at = large.numel() - common
            both = torch.zeros(at + small.numel(), dtype=self.dtype, device=self.device)
            both[: large.numel()] = large.reshape(-1).to(self.device)
            second[two] = self.given(both[: large.numel()].view(large.shape))
            first[one] = self.given(both[at:].view(small.shape))

    def write(self, seed: int) -> None:
        state, key = random.Random(seed).choice(list(self.states()))
        state[key].mul_(0.5)

    def state(self) -> dict[str, Any]:
        return {"parameters": [each.data for each in self.parameters], **self.saved()}

    def saved(self) -> dict[str, Any]:
        states = self.optimizer.state_dict()["state"]
        return {"states": {name: dict(each) for name, each in states.items()}}


def offload(world: World, chance: random.Random) -> None:
    residency.offload_optimizer(
        world.optimizer,
        bucket=chance.choice([700, 4096, "64KiB", "1MiB"]),
        slots=chance.randint(1, 3),
        resident=chance.choice([0, 0, 3000, 20_000, "1MiB"]),
        pin=some(chance, 0.7),
    )


def in_file(saved: Any) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file)


def judge_shared_states(chance: random.Random, device: torch.device) -> None:
    seed = chance.randrange(1 << 30)
    worlds = stock, ours = [World(seed, device, is_stock=each) for each in (True, False)]

    def both(method: Callable[..., None], **options: Any) -> None:
        seed = chance.randrange(1 << 30)
        for world in worlds:
            method(world, seed, **options)

    both(World.step, all_have=True)
    offload(ours, chance)
    for _ in range(chance.randint(3, 9)):
        match chance.choice(["step"] * 4 + ["give", "give", "write", "snapshot", "move", "load"]):
            case "step":
                both(World.step)
            case "give":
                both(World.give)
            case "write":
                both(World.write)
            case "snapshot":
                then = host_copy(stock.state()["states"])
                taken = residency.snapshot({"optimizer": ours.optimizer}, pin=some(chance, 0.7))
                for _ in range(chance.randint(1, 2)):
                    both(World.step)
                same(dict(taken.tree["optimizer"])["state"], then, "snapshot")
                del taken
            case "move":
                residency.onload_optimizer(ours.optimizer)
                if some(chance, 0.5):
                    both(World.step)
                offload(ours, chance)
            case "load":
                way = chance.choice([copy.deepcopy, in_file])
                for world in worlds:
                    world.optimizer.load_state_dict(way(world.optimizer.state_dict()))
        same(ours.state(), stock.state(), "after an action")


@pytest.mark.sim_device(capacity=96 << 20)
def test_states_that_are_given_on_train_as_on_stock_torch(
    sim_device: torch.device, torture: Callable[..., None]
) -> None:
    def judge(chance: random.Random) -> None:
        with nothing_left(chance):
            judge_shared_states(chance, sim_device)

    torture(judge)
