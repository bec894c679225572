"""Programs that are killed, as tasks of a warm process: each logs a digest before every save."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import random
import runpy
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # torch imports these two at a first step
import torch.distributed.checkpoint
from random_states import bits, digest
from torch import nn
from warm_process import Log, Task, serve

import residency
from residency import sim
from residency.testing import simulated_device_type

PATIENCE = 600.0  # of the two sides of a hand-off

OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: torch.optim.AdamW(p, lr=1e-2),
    lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    lambda p: torch.optim.NAdam(p),
]
SCHEDULERS: list[Callable[[torch.optim.Optimizer], Any]] = [
    lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    lambda o: torch.optim.lr_scheduler.LinearLR(o, total_iters=7),
]


class Training:
    """A training run of one seed, whose next step follows from its state and generators alone."""

    def __init__(self, seed: int, device: torch.device, offload: bool) -> None:
        chance = random.Random(seed)
        torch.manual_seed(seed)
        random.seed(seed)
        self.device = device
        width = chance.choice([33, 128, 128, 384, 512])  # 512 to 2048 bytes of bias, no 4096
        self.width = width
        self.net = nn.Sequential(
            nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 128)
        ).to(device)
        self.optimizer = chance.choice(OPTIMIZERS)(self.net.parameters())
        bucket = chance.choice(["64KiB", "1MiB", "128MiB"])
        if offload:
            residency.offload_optimizer(self.optimizer, bucket=bucket)
        self.scheduler = chance.choice(SCHEDULERS)(self.optimizer)
        self.average = [torch.zeros_like(p) for p in self.net.parameters()]
        self.host = torch.randn(chance.choice([0, 3, 384, 65536]))
        self.progress: dict[str, Any] = {
            "step": 0,
            "losses": [],
            "text": "x" * chance.choice([0, 9]),
        }
        self.state = {
            "model": self.net,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "average": self.average,
            "host": self.host,
            "progress": self.progress,
        }

    def step(self) -> None:
        self.optimizer.zero_grad()
        value = torch.randn(4, self.width).to(self.device)
        value = value + torch.randn(4, self.width, device=self.device) * random.random()
        self.net(value).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()
        with residency.mutating(*self.average), torch.no_grad():
            for mine, parameter in zip(self.average, self.net.parameters(), strict=True):
                mine.lerp_(parameter, 0.1)
        self.host += 1
        self.progress["step"] += 1
        self.progress["losses"].append(random.random())

    def digest(self) -> str:
        """Returns one number of all that decides the run, read with stock torch."""
        found = hashlib.sha256()
        for name, value in sorted(digest(self.state).items()):
            found.update(repr((name, value)).encode())
        found.update(bits(torch.get_rng_state()) + repr(random.getstate()).encode())
        return found.hexdigest()


def device_of(request: dict[str, Any]) -> torch.device:
    face = simulated_device_type()
    if face is not None:
        return sim.enable(
            request.get("capacity", "256MiB"),
            schedule=request.get("schedule", "late"),
            share=request.get("share"),
            device=face,
            workspaces=False,
        )
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found


def checkpointer_of(request: dict[str, Any]) -> residency.Checkpointer:
    return residency.Checkpointer(request["folder"], **request["options"])


def reference(request: dict[str, Any], log: Log) -> None:
    """Trains with torch's own optimizer, saves nothing, and tells each moment."""
    training = Training(request["seed"], device_of(request), offload=False)
    for step in range(request["until"] + 1):
        log("moment", step=step, digest=training.digest())
        training.step()


def train(request: dict[str, Any], log: Log) -> None:
    """Restores what there is, trains and saves, and tells everything."""
    chance = random.Random(request["life"])
    device = device_of(request)
    if request.get("share"):
        log("memory", free=torch.accelerator.get_memory_info(device)[0])
    training = Training(request["seed"], device, offload=request["offload"])
    with contextlib.ExitStack() as stack:
        if request.get("record"):
            stack.enter_context(residency.record(request["record"]))
        checkpointer = stack.enter_context(checkpointer_of(request))
        steps = checkpointer.steps()
        log("found", steps=steps)
        if steps:
            log("restoring")
            step = checkpointer.restore(training.state, eager=chance.random() < 0.3)
            log("restored", step=step, digest=training.digest())
        if chance.random() < 0.5:
            checkpointer.prepare(training.state)
        for _ in range(request["saves"]):
            if training.progress["step"] >= request["until"]:
                break
            training.step()
            step = training.progress["step"]
            log("moment", step=step, digest=training.digest())
            saves = [checkpointer.save(step, training.state)]
            log("saved", step=step)
            if chance.random() < request["again"]:
                saves.append(checkpointer.save(step, training.state))
            if chance.random() < request["wait"]:
                saves[chance.randrange(len(saves))].wait()
                log("done", step=step)
        log("closing")
    log("closed")


def interrupted(request: dict[str, Any], log: Log) -> None:
    """Trains and saves on through whatever Ctrl-C comes, and tells everything."""
    is_armed = False

    def interrupt(number: int, frame: Any) -> None:
        nonlocal is_armed
        if is_armed:
            is_armed = False  # once each, so that what follows one has its turn
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    chance = random.Random(request["life"])
    training = Training(request["seed"], device_of(request), offload=request["offload"])
    checkpointer = checkpointer_of(request)
    checkpointer.save(0, training.state)
    checkpointer.wait()
    log("done", step=0)
    log("ready")
    place = "before"
    is_torn = False
    while place != "closed":
        try:
            is_armed = True
            if is_torn:
                place = "restore"
                step = checkpointer.restore(training.state)
                is_armed = False
                log("restored", step=step, digest=training.digest())
                is_torn, is_armed = False, True
            while training.progress["step"] < request["until"]:
                place, is_torn = "step", True
                training.step()
                place, is_torn = "look", False
                step = training.progress["step"]
                log("moment", step=step, digest=training.digest())
                place = "save"
                save = checkpointer.save(step, training.state)
                if chance.random() < request["wait"]:
                    place = "wait"
                    save.wait()
                    log("done", step=step)
            place = "close"
            checkpointer.close()
            place = "closed"
        except KeyboardInterrupt:
            is_armed = False
            torch.set_grad_enabled(True)  # torch's own blocks may leave it off
            log("interrupted", place=place)
        is_armed = False
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    checkpointer.close()
    with checkpointer_of(request) as checkpointer:
        last = training.progress["step"]
        log("restored", step=checkpointer.restore(training.state), digest=training.digest())
        checkpointer.save(last + 1, training.state).wait()
    names = sorted(os.listdir(request["folder"]))
    del training, checkpointer, save
    gc.collect()
    torch.accelerator.synchronize()
    log(
        "closed",
        names=names,
        device=torch.accelerator.memory_allocated(),
        threads=threading.active_count(),
    )


def hand_over(request: dict[str, Any], log: Log) -> None:
    """Trains, and hands the device over after each step, until it is killed."""
    device = device_of(request)
    training = None
    while training is None:
        with contextlib.suppress(torch.OutOfMemoryError):  # an engine may have the device still
            training = Training(request["seed"], device, request["offload"])
    park = [training.optimizer, training.net]
    while True:
        training.step()
        moment = training.digest()
        log("moment", step=training.progress["step"], digest=moment)
        try:
            with residency.hand_off(0, park=park, peer=request["peer"], timeout=PATIENCE):
                log("given")
        except residency.HandOffError as error:
            log("error", said=str(error))
            error.retry()
        log("back", same=training.digest() == moment)


def engine(request: dict[str, Any], log: Log) -> None:
    """Takes the device, fills it and gives it back, until it is killed."""
    device = device_of(request)
    num_bytes = request["need"] - (4 << 20)  # the rest is for what `all` makes
    while True:
        try:
            with residency.take_over(request["need"], peer=request["peer"], timeout=PATIENCE):
                taken = torch.ones(num_bytes, dtype=torch.uint8, device=device)
                is_whole = bool(taken.all())
                del taken
            log("returned", whole=is_whole)
        except residency.HandOffError as error:
            log("error", said=str(error))


def command(request: dict[str, Any], log: Log) -> None:
    """Runs the command line of this package, in a fork."""
    sys.argv = ["residency", *request["words"]]
    runpy.run_module("residency", run_name="__main__", alter_sys=True)


TASKS: dict[str, Task] = {
    "reference": reference,
    "train": train,
    "interrupted": interrupted,
    "hand_over": hand_over,
    "engine": engine,
    "command": command,
}


if __name__ == "__main__":
    serve(TASKS)
