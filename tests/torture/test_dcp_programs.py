"""Random runs save through ``torch.distributed.checkpoint`` while they train, and are resumed.

The truth is a run of torch's own optimizer that saves nothing. What is on the disk is read with
torch's recipe (``get_state_dict``, ``set_state_dict``), with torch's readers and safetensors.
"""

from __future__ import annotations

import copy
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from random_states import bits, digest
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import residency
from residency.integrations.dcp import (
    PinnedStager,
    ResidencyStorageReader,
    ResidencyStorageWriter,
    TrainState,
    TrainStatePlanner,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Judge = Callable[[random.Random], None]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True, amsgrad=True),
    "loop": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=False),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
}
SCHEDULERS: list[Callable[[torch.optim.Optimizer], Any]] = [
    lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.01, 99, cycle_momentum=False),
]


class Loader:
    """Is a data loader that has a state."""

    def __init__(self) -> None:
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.idle = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)
        self.last = nn.Linear(width, width, bias=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(value)).relu() * self.frozen)


class Run:
    """A training run whose step follows from its state and the step's number."""

    def __init__(self, plan: dict[str, Any], device: torch.device, offload: Any) -> None:
        torch.manual_seed(plan["seed"])
        self.plan, self.device = plan, device
        self.net = Net(plan["width"]).to(device, plan["dtype"])
        trained = [p for p in self.net.parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [{"params": trained[:2]}, {"params": trained[2:]}]
        groups[1]["lr"] = 3e-3
        self.optimizer = OPTIMIZERS[plan["optimizer"]](groups)
        if offload is not None:
            residency.offload_optimizer(self.optimizer, **offload)
        self.scheduler = plan["scheduler"](self.optimizer)
        self.loader = Loader()
        self.losses: list[torch.Tensor] = []

    def step(self) -> None:
        generator = torch.Generator().manual_seed(self.plan["seed"] + self.loader.place)
        shape = (4, self.plan["width"])
        value = torch.randn(shape, generator=generator, dtype=torch.float32)
        loss = self.net(value.to(self.device, self.plan["dtype"])).square().mean()
        if self.plan["idle"] and self.loader.place % 2:
            loss = loss + self.net.idle.square().sum()
        loss.backward()
        self.losses.append(loss.detach().clone())
        if self.plan["clip"]:
            nn.utils.clip_grad_norm_(self.net.parameters(), self.plan["clip"])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.loader.place += 1

    def app(self) -> TrainState:
        return TrainState(
            self.net, self.optimizer, scheduler=self.scheduler, loader=self.loader, seen=-1
        )

    def moment(self) -> dict[str, Any]:
        """Reads all of the run with stock torch; states by the places of their parameters."""
        held = self.optimizer.state_dict()
        return digest(
            {
                "net": self.net,
                "state": held["state"],
                "groups": held["param_groups"],
                "scheduler": self.scheduler,
                "loader": self.loader,
            }
        )


class Recipe:
    """Is torch's own recipe, for what it covers."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.run.net, self.run.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.run.net,
            self.run.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def draw(chance: random.Random) -> dict[str, Any]:
    return {
        "seed": chance.randrange(1 << 30),
        "width": chance.choice([1, 3, 8, 33, 64]),
        "dtype": chance.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16]),
        "optimizer": chance.choice(list(OPTIMIZERS)),
        "scheduler": chance.choice(SCHEDULERS),
        "idle": chance.random() < 0.5,
        "clip": chance.choice([None, 1.0, 0.01]),
        "steps": chance.randint(2, 7),
    }


def offload_of(chance: random.Random) -> dict[str, Any] | None:
    if chance.random() < 0.3:
        return None
    return {
        "resident": chance.choice([0, 0, 3000, "1MiB"]),
        "bucket": chance.choice([4096, "16KiB", "128MiB"]),
        "slots": chance.choice([2, 3, 4]),
        "pin": chance.random() < 0.8,
    }


def truth_of(plan: dict[str, Any], device: torch.device) -> tuple[list[Any], list[bytes]]:
    """Trains with torch's own optimizer; returns the moment before each step and after the last."""
    run = Run(plan, device, None)
    moments = [run.moment()]
    for _ in range(plan["steps"]):
        run.step()
        moments.append(run.moment())
    return moments, [bits(loss) for loss in run.losses]


def check(run: Run, moment: dict[str, Any], said: str) -> None:
    found = run.moment()
    names = [name for name in found.keys() | moment.keys() if found.get(name) != moment.get(name)]
    assert not names, (said, sorted(names)[:8])


def save_all(
    chance: random.Random, plan: dict[str, Any], device: torch.device, folder: Path
) -> dict[int, tuple[str, Path]]:
    """Trains, and saves at random steps; returns format and place of each save, by step."""
    run = Run(plan, device, offload_of(chance))
    app = run.app()
    stager = PinnedStager(
        pin=chance.random() < 0.8, spare=chance.choice([None, None, "all", 0, "16KiB"])
    )
    saves: dict[int, tuple[str, Path]] = {}
    pending: list[Any] = []
    with stager:
        for step in range(plan["steps"] + 1):
            if chance.random() < 0.5 or (step == plan["steps"] and not saves):
                app.counters["seen"] = step
                kind = chance.choice(["stock", "ours"])
                place = folder / f"step-{step:08d}"
                writer: Any = (
                    ResidencyStorageWriter(place)
                    if kind == "ours"
                    else dcp.FileSystemWriter(place, thread_count=chance.choice([1, 2]))
                )
                saves[step] = (kind, place)
                if chance.random() < 0.7:
                    pending.append(
                        dcp.async_save(
                            {"app": app}, storage_writer=writer, async_stager=stager, no_dist=True
                        )
                    )
                else:
                    dcp.save({"app": app}, storage_writer=writer, no_dist=True)
                app.counters["seen"] = -2
            if pending and chance.random() < 0.3:
                pending.pop(0).upload_completion.result()
            if step < plan["steps"]:
                run.step()
        for each in pending:
            each.upload_completion.result()
    return saves


def reader_of(kind: str, place: Path) -> Any:
    return ResidencyStorageReader(place) if kind == "ours" else dcp.FileSystemReader(place)


def judge_run(chance: random.Random, device: torch.device, folder: Path) -> None:
    plan = draw(chance)
    moments, losses = truth_of(plan, device)
    saves = save_all(chance, plan, device, folder)
    step = chance.choice(sorted(saves))
    kind, place = saves[step]
    said = f"{plan} at {step} by {kind}"
    run = Run(plan, device, offload_of(chance))
    for _ in range(chance.choice([0, 0, 1])):
        run.step()  # it has a state of its own, which is replaced
    run.losses.clear()
    app = run.app()
    planner = TrainStatePlanner() if chance.random() < 0.5 else None
    dcp.load({"app": app}, storage_reader=reader_of(kind, place), planner=planner, no_dist=True)
    assert app.counters["seen"] == step, said
    if chance.random() < 0.5:
        check(run, moments[step], f"the load of {said}")
    for later in range(step, plan["steps"]):
        run.step()
        check(run, moments[later + 1], f"step {later + 1} after {said}")
    assert [bits(loss) for loss in run.losses] == losses[step:], said
    check_readers(chance, kind, place, plan, device, moments[step])
    check_recipe(chance, kind, place, plan, device, moments[step], said)


def check_readers(
    chance: random.Random,
    kind: str,
    place: Path,
    plan: dict[str, Any],
    device: torch.device,
    moment: dict[str, Any],
) -> None:
    """Reads the weights with stock readers, and with `load_into`."""
    net = Net(plan["width"]).to(device, plan["dtype"])
    names = {name: torch.zeros_like(value) for name, value in net.state_dict().items()}
    reader: Any = (
        HuggingFaceStorageReader(str(place)) if kind == "ours" else dcp.FileSystemReader(place)
    )
    tree = {"app": {"model": names}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(tree, storage_reader=reader, no_dist=True)
    for name, value in names.items():
        assert bits(value) == moment[f"['net']:['{name}']"][2], name


def check_recipe(
    chance: random.Random,
    kind: str,
    place: Path,
    plan: dict[str, Any],
    device: torch.device,
    moment: dict[str, Any],
    said: str,
) -> None:
    """Reads a save with torch's recipe, and what the recipe wrote with ours."""
    cast = () if plan["dtype"] == torch.float32 else ("['mu_product']",)  # NAdam's, by the recipe
    stock = Run(plan, device, None)
    dcp.load({"app": Recipe(stock)}, storage_reader=reader_of(kind, place), no_dist=True)
    found = stock.moment()
    for name in moment:  # one that had no state has one of zeros now
        if name.startswith(("['net']", "['state']")) and not name.endswith(cast):
            assert found[name] == moment[name], (said, name)
    other = place.parent / "of the recipe"
    before = copy.deepcopy(found)
    dcp.save({"app": Recipe(stock)}, checkpoint_id=other, no_dist=True)
    run = Run(plan, device, offload_of(chance))
    state = TrainState(run.net, run.optimizer)
    dcp.load({"app": state}, checkpoint_id=other, planner=TrainStatePlanner(), no_dist=True)
    found = run.moment()
    for name in before:
        if name.startswith(("['net']", "['state']", "['groups']")) and not name.endswith(cast):
            assert found.get(name) == before[name], (said, name)


def test_a_run_through_dcp_is_that_of_the_moment_of_its_save(
    torture: Callable[[Judge], None], device: torch.device, tmp_path: Path
) -> None:
    def judge(chance: random.Random) -> None:
        place = tmp_path / "round"
        place.mkdir()
        try:
            judge_run(chance, device, place)
        finally:
            shutil.rmtree(place)

    torture(judge)
