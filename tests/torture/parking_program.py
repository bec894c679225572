"""Trainings with previews in their midst: with ``residency.parked`` around each, and stock without.

A warm process forks for each round. In a fork one plan is run twice, one after the other, on the
simulator in CUDA's place, its work late or overtaking. Between parts of a step come interludes:
previews, generations, saves, averages, exceptions, out-of-memory errors. Ours parks owners around
each, with blocks inside blocks. Both runs must have the same bits after each interlude and step;
the bytes inside and after a block are those that the docs of ``residency.parked`` promise.
"""

from __future__ import annotations

import gc
import os
import random
import warnings
from pathlib import Path
from typing import Any

import torch
from framework_lab import assert_same
from parking_bodies import Bodies
from parking_worlds import (
    World,
    device_bytes,
    draw_offload,
    draw_training,
    offload,
    tensors_of,
)
from warm_process import Log, serve

import residency
from residency import sim

PLACES = ["begin", "forward", "backward", "step", "zero"]
BODIES = [
    *("preview", "preview", "noisy", "generate", "sensitivity", "make", "average", "swap"),
    *("save", "torch save", "snapshot", "load", "zero", "refused", "copy", "schedule"),
    *("reclaim", "unpark", "grow", "large"),
]
ENDINGS: list[Any] = [
    ValueError,
    KeyboardInterrupt,
    SystemExit,
    StopIteration,
    torch.OutOfMemoryError,
]


def draw_interlude(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    """Draws one block: who is parked, what its body does, how it ends."""
    names = ["optimizer 0", "optimizer 0", "optimizer 1", "model", "average", "reference", "host"]
    body: list[Any] = [chance.choice(BODIES) for _ in range(chance.randint(0, 4))]
    if depth < 2 and chance.random() < 0.3:
        body.insert(chance.randint(0, len(body)), draw_interlude(chance, depth + 1))
    return {
        "owners": [chance.choice(names) for _ in range(chance.choice([1, 1, 2, 2, 3, 5]))],
        "gradients": chance.choice(["move", "move", "move", "drop"]),
        "pin": chance.random() < 0.7,
        "fork": chance.random() < 0.5,
        "before": chance.choice(names) if chance.random() < 0.15 else None,
        "body": body,
        "seed": chance.randrange(1 << 30),
        "ending": chance.choice(ENDINGS) if chance.random() < 0.3 else None,
        "fill": depth == 0 and chance.random() < 0.08,
    }


class Run(Bodies):
    """One of the two runs of a plan."""

    def __init__(self, plan: dict[str, Any], folder: Path, *, is_ours: bool) -> None:
        super().__init__(plan, is_ours=is_ours)
        self.bytes_after: list[int] = []
        self.pictures: list[dict[str, Any]] = []
        self.checkpointer = residency.Checkpointer(folder) if is_ours else None

    # ------------------------------------------------------------------------------- the training

    def train(self, interludes: dict[str, list[dict[str, Any]]]) -> None:
        world, plan = self.world, self.world.plan
        chance = random.Random(plan["seed"])
        for step in range(plan["steps"]):
            self.interludes(interludes, f"begin {step}")
            for _ in range(plan["accumulate"]):
                loss = world.loss(chance)
                self.has_graph = True
                self.interludes(interludes, f"forward {step}")
                loss.backward()
                self.has_graph = False
                del loss
                self.interludes(interludes, f"backward {step}")
            world.step(chance)
            self.is_lazy = False
            self.interludes(interludes, f"step {step}")
            world.schedule(chance.random())
            self.update()
            world.zero()
            self.interludes(interludes, f"zero {step}")
            self.pictures.append(world.picture())

    def interludes(self, all_of: dict[str, list[dict[str, Any]]], place: str) -> None:
        for interlude in all_of.get(place, []):
            self.interlude(interlude)
            if not self.has_graph:
                self.look()
                gc.collect()
                torch.cuda.synchronize()
                torch._C._cuda_clearCublasWorkspaces()
                self.bytes_after.append(torch.cuda.memory_allocated())
            self.pictures.append(self.world.picture())

    def parked_names(self, interlude: dict[str, Any]) -> list[str]:
        """Returns the owners of a block, those that this training has."""
        owners = self.world.owners()
        names = [name for name in interlude["owners"] if name in owners]
        if self.has_graph:  # the pass that is under way needs the model where it is
            names = [name for name in names if name != "model"]
        return names

    def interlude(self, interlude: dict[str, Any]) -> None:
        """Runs a block; both runs go through the same body."""
        before = interlude["before"]
        owners = self.world.owners()
        parks_before = (
            before != "host" and before in owners and before not in self.away and not self.has_graph
        )
        if parks_before:
            self.away.append(before)
            self.kept_away.append(before)
            if self.is_ours:
                residency.park(owners[before], pin=interlude["pin"])
        names = self.parked_names(interlude)
        now = [name for name in dict.fromkeys(names) if name not in self.away]
        filled: list[torch.Tensor] = []
        was = self.places(now) if self.is_ours else {}
        try:
            (self.ours if self.is_ours else self.stock)(interlude, names, now, filled)
        except tuple(ENDINGS) as error:
            if interlude["ending"] is not type(error) and not interlude["fill"]:
                raise
            if self.is_ours and not filled:
                self.check_back(now, was, "while the error is kept")
            if not interlude["fill"]:
                self.world.log.append(repr(error)[:60])
            del error
        if filled:
            filled.clear()
            for name in now:
                residency.unpark(owners[name])
        if self.is_ours:
            self.check_back(now, was, "after the block")
        if parks_before:
            self.away.remove(before)
            self.kept_away.remove(before)
            if self.is_ours:
                if before != "host" and device_bytes([owners[before]]) and not self.is_lazy:
                    stays = device_bytes([owners[before]])
                    assert not stays, f"{before} was parked before the block and came back: {stays}"
                residency.unpark(owners[before])

    def stock(
        self, interlude: dict[str, Any], names: list[str], now: list[str], filled: list[Any]
    ) -> None:
        host, device = torch.get_rng_state(), torch.cuda.get_rng_state()
        for name in now:
            owner = self.world.owners()[name]
            if interlude["gradients"] == "drop" and isinstance(owner, torch.nn.Module):
                owner.zero_grad(set_to_none=True)
        self.away += now
        try:
            self.body(interlude)
        finally:
            for name in now:
                self.come_back(name)
            if interlude["fork"]:
                torch.set_rng_state(host)
                torch.cuda.set_rng_state(device)

    def ours(
        self, interlude: dict[str, Any], names: list[str], now: list[str], filled: list[Any]
    ) -> None:
        owners = self.world.owners()
        chosen = [owners[name] for name in names]
        assert self.checkpointer is not None
        is_quiet = not self.snapshots and not self.has_graph
        if is_quiet:
            self.checkpointer.wait()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        expected = device_bytes([owners[name] for name in now])
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.away += now
        options = {key: interlude[key] for key in ("gradients", "pin")}
        try:
            with residency.parked(*chosen, fork_rng=interlude["fork"], **options) as freed:
                self.check_inside(now, before, expected, freed, is_quiet)
                try:
                    self.body(interlude)
                finally:
                    gc.collect(0)
                    torch.cuda.synchronize()
                    at_end = torch.cuda.memory_allocated()
                    torch.cuda.reset_peak_memory_stats()
                if interlude["fill"]:
                    self.fill(filled)
        finally:
            for name in now:
                self.come_back(name)
        if is_quiet and not filled:
            peak = torch.cuda.max_memory_allocated()
            bound = max(before, at_end) + max(0, at_end - (before - freed))
            assert peak <= bound, f"on the way back {peak} bytes, {bound} expected"

    # ------------------------------------------------------------------------------- the promises

    def check_inside(
        self, now: list[str], before: int, expected: int, freed: int, is_quiet: bool
    ) -> None:
        owners = self.world.owners()
        inside = torch.cuda.memory_allocated()
        peak = torch.cuda.max_memory_allocated()
        assert peak <= before, f"parking took {peak - before} bytes of the device"
        if is_quiet and not self.is_lazy:
            assert freed == before - inside, (freed, before, inside)
            assert freed == expected, f"{freed} bytes freed, {expected} expected of {now}"
            for name in now:
                stays = [t.shape for t in tensors_of(owners[name]) if t.device.type != "cpu"]
                assert not stays, (name, stays)
            unused = [s for s in torch.cuda.memory_snapshot() if not s["allocated_size"]]
            assert not unused, f"segments that nobody uses: {unused}"

    def places(self, names: list[str]) -> dict[str, list[str]]:
        """Returns on which kind of device each tensor of some owners is."""
        owners = self.world.owners()
        return {name: [t.device.type for t in tensors_of(owners[name])] for name in names}

    def check_back(self, now: list[str], was: dict[str, list[str]], when: str) -> None:
        """Every tensor that the block sent away is where it was; others may have come."""
        found = self.places([name for name in now if name not in self.away])
        for name, places in found.items():
            assert places.count("cpu") <= was[name].count("cpu"), (when, name, was[name], places)

    def fill(self, filled: list[torch.Tensor]) -> None:
        """Takes all the room that there is, and keeps it past the end of the block."""
        for size in (1 << 20, 1 << 12, 512):
            try:
                while True:
                    filled.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                pass


def go_on(
    chance: random.Random,
    plan: dict[str, Any],
    checkpointer: residency.Checkpointer,
    number: int,
    truth: dict[str, Any],
) -> None:
    """Restores a save that a body made; two trainings, one offloaded, go on from it alike."""
    pictures = []
    for settings in (None, draw_offload(chance, plan)):
        again = World(plan | {"seed": 1})
        if settings is not None:
            offload(again, settings)
        checkpointer.restore(again.state(), step=number, rng=False)
        assert_same(again.saved_picture(), truth, f"save {number}")
        torch.manual_seed(7)
        again.zero()
        steps = random.Random(7)
        again.loss(steps).backward()
        again.step(steps)
        pictures.append(again.picture())
    assert_same(*pictures, f"after save {number}")


def judge(request: dict[str, Any], log: Log) -> None:
    """Runs one plan twice and compares."""
    chance = random.Random(request["seed"])
    warnings.simplefilter("ignore")
    sim.enable(
        f"{chance.choice([64, 160])}MiB",
        context="0B",
        schedule=chance.choice(["late", "overtake", "eager"]),
        check_races=chance.random() < 0.5,
        device="cuda",
    )
    os.chdir(request["folder"])
    plan = draw_training(chance)
    settings = draw_offload(chance, plan)
    interludes: dict[str, list[dict[str, Any]]] = {}
    for _ in range(chance.randint(1, 6)):
        place = f"{chance.choice(PLACES)} {chance.randrange(plan['steps'])}"
        interludes.setdefault(place, []).append(draw_interlude(chance))
    log("plan", plan=repr(plan), settings=repr(settings), interludes=repr(interludes))
    stock = Run(plan, Path("stock"), is_ours=False)
    stock.train(interludes)
    seen, saved, after = stock.pictures, stock.saves, stock.bytes_after
    del stock
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() == 0, "the judge itself keeps tensors"
    torch.cuda.empty_cache()
    ours = Run(plan, Path("ours"), is_ours=True)
    if settings is not None:
        offload(ours.world, settings)
        ours.is_offloaded = True
    ours.train(interludes)
    ours.look()
    for number, (mine, theirs) in enumerate(zip(ours.pictures, seen, strict=True)):
        assert_same(mine, theirs, f"picture {number}")
    if settings is None and "load" not in repr(interludes):
        assert ours.bytes_after == after, (ours.bytes_after, after)
    assert ours.checkpointer is not None
    ours.checkpointer.wait()
    for number, truth in saved.items():
        go_on(chance, plan, ours.checkpointer, number, truth)
    ours.checkpointer.close()
    torch.cuda.synchronize()


if __name__ == "__main__":
    serve({"parked": judge})
