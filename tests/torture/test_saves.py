"""Random training states are saved while training goes on: every restore is the moment of its save.

What the state was is read with stock torch at the moment of the call; files are read again with
json, zlib, stock safetensors and torch's own checkpoint reader.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from random_states import Bag, bits, check_format, differing, digest
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, HuggingFaceStorageReader

import residency
from residency import sim

KNOWN: dict[str, bool] = {}

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")

Judge = Callable[[random.Random], None]
Torture = Callable[[Judge], None]


@pytest.fixture(params=["disk", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path
        return
    shared = Path("/dev/shm") / f"residency-torture-{os.getpid()}"
    shared.mkdir()
    yield shared
    shutil.rmtree(shared)


def held() -> dict[str, int]:
    gc.collect()
    torch.accelerator.synchronize()
    return {
        "device": torch.accelerator.memory_allocated(),
        "pinned": sim.pinned_memory_stats()["used_bytes.current"],
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }


class Net(nn.Module):
    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, dtype=dtype)
        self.norm = nn.BatchNorm1d(width, dtype=dtype)
        self.last = nn.Linear(width, width, dtype=dtype)
        self.last.weight = self.first.weight
        self.unused = nn.Parameter(torch.randn(3, dtype=dtype))
        self.register_buffer("scale", torch.full((), 0.5, dtype=dtype))
        self.register_buffer("fleeting", torch.ones(2), persistent=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(value)).relu()) * self.scale


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: torch.optim.AdamW(p, lr=1e-2),
    lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, foreach=False),
    lambda p: torch.optim.SGD(p, lr=1e-2),
    lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    lambda p: torch.optim.Adagrad(p, lr=1e-2),
    lambda p: torch.optim.NAdam(p),
    lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    lambda p: torch.optim.Rprop(p),
    lambda p: torch.optim.ASGD(p),
    lambda p: torch.optim.Adafactor(p),
]


class Run:
    """A training run of one seed: all that a state holds."""

    def __init__(self, seed: int, device: torch.device, *, offload: bool) -> None:
        chance = random.Random(seed)
        torch.manual_seed(seed)
        self.device = device
        self.width = chance.choice([1, 3, 8, 33, 128])
        dtype = chance.choice([torch.float32, torch.float32, torch.float64])
        self.net = Net(self.width, dtype).to(device)
        self.dtype = dtype
        parts = [
            {"params": [self.net.first.weight]},
            {"params": [p for p in self.net.parameters() if p is not self.net.first.weight]},
        ]
        parts[1]["lr"] = 1e-3
        self.optimizer = chance.choice(OPTIMIZERS)(parts)
        limits: dict[str, Any] = {
            "bucket": chance.choice(["4KiB", "64KiB", "128MiB"]),
            "resident": chance.choice([0, 0, "16KiB"]),
            "slots": chance.choice([2, 3]),
        }
        if offload:
            residency.offload_optimizer(self.optimizer, **limits)
        kinds: list[Any] = [
            lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
            lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.01, 1000, cycle_momentum=False),
            lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
            lambda o: torch.optim.lr_scheduler.LinearLR(o, total_iters=7),
        ]
        self.scheduler = chance.choice(kinds)(self.optimizer)
        on = chance.random() < 0.5
        self.scaler = torch.amp.GradScaler(device.type, enabled=on, growth_interval=2)
        many = chance.random() < 0.03
        count = 5000 if many else chance.choice([0, 1, 5, 20, 60])
        self.bag = Bag(seed, device, count, large=0 if many else chance.choice([0, 0, 1, 3]))
        self.progress: dict[str, Any] = {"seen": 0, "losses": [], "best": float("inf")}
        self.state = {
            "model": self.net,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "progress": self.progress,
            "bag": self.bag.nested(chance),
        }
        if chance.random() < 0.2:
            self.state |= {f"part {i}/x": t for i, t in enumerate(self.bag.flats[:40])}

    def step(self) -> None:
        value = torch.randn(4, self.width, dtype=self.dtype).to(self.device)
        loss = self.net(value).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a scaler may have left the step out
            self.scheduler.step()
        self.progress["seen"] += 4
        self.progress["losses"].append(self.progress["seen"] * 0.1)
        self.progress["best"] = -0.0

    def scramble(self, chance: random.Random) -> None:
        on_device = [flat for flat in self.bag.flats if flat.device.type != "cpu"]
        with residency.mutating(*on_device):
            self.bag.scramble(chance)

    def moment(self) -> dict[str, Any]:
        found = digest(self.state)
        found["generators"] = (bits(torch.get_rng_state()), random.getstate())
        return found


def expected_steps(order: list[tuple[int, float | None]], keep: Any) -> list[int]:
    """Replays the rule of what stays, publication by publication."""
    there: dict[int, float | None] = {}
    for step, loss in order:
        there[step] = loss
        if keep is None:
            continue
        if isinstance(keep, int):
            stay = set(sorted(there)[-keep:])
        else:
            stay = set(sorted(there)[-(keep.newest or 1) :])
            marked = [(value, s) for s, value in there.items() if value is not None]
            marked = [(value, s) for value, s in marked if value == value]
            marked.sort(key=lambda pair: pair[0], reverse=keep.greatest)
            stay |= {s for _, s in marked[: keep.best]}
        there = {s: value for s, value in there.items() if s in stay}
    return sorted(there)


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "residency", "checkpoint", *words, "--json"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def check_readers(save: Path, run: Run, then: dict[str, Any], chance: random.Random) -> None:
    """Reads a save with stock tools and compares with the moment of its call."""
    tensors = check_format(save)
    weights = {n[len("model.") :]: t for n, t in tensors.items() if n.startswith("model.")}
    for name, tensor in weights.items():
        kind, shape, raw = then[f"['model']:['{name}']"]
        assert (str(tensor.dtype), tuple(tensor.shape), bits(tensor)) == (kind, shape, raw), name
    names = {"first.weight", "first.bias", "norm.weight", "norm.running_mean", "last.bias"}
    assert names | {"unused", "scale"} <= weights.keys()
    assert not {"last.weight", "fleeting"} & weights.keys()
    if chance.random() < 0.3:
        there = {
            f"model.{name}": torch.zeros_like(tensor)
            for name, tensor in run.net.state_dict().items()
            if name in weights
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(
                there,
                storage_reader=HuggingFaceStorageReader(str(save)),
                planner=DefaultLoadPlanner(allow_partial_load=True),
                no_dist=True,
            )
        for name, tensor in there.items():
            assert bits(tensor) == then[f"['model']:['{name[6:]}']"][2], name


def check_load_into(save: Path, folder: Path, run: Run, then: dict[str, Any]) -> None:
    other = Net(run.width, run.dtype).to(run.device)
    copied = folder.parent / "copy of a save"
    shutil.copytree(save, copied)
    sources = [save, copied]
    if max(int(path.name[5:]) for path in folder.glob("step-*")) == int(save.name[5:]):
        sources.append(folder)
    torch.save(run.net.state_dict(), folder.parent / "weights.pt")
    for source in sources:
        assert not residency.load_into(other, source, staging="64KiB")
        for name, tensor in other.state_dict().items():
            assert bits(tensor) == then[f"['model']:['{name}']"][2], (source, name)
        assert other.last.weight is other.first.weight
    assert not residency.load_into(other, folder.parent / "weights.pt")
    assert not differing(digest({"": other}), digest({"": run.net}))


def judge_run(chance: random.Random, root: Path, device: torch.device) -> None:
    seed = chance.randrange(1 << 30)
    run = Run(seed, device, offload=chance.random() < 0.6)
    keep = chance.choice(
        [
            None,
            1,
            2,
            residency.Retention(best=1, metric="loss"),
            residency.Retention(newest=2, best=2, metric="loss", greatest=True),
        ]
    )
    folder = root / chance.choice(["saves", "a b/c", "Größe"])
    policy = chance.choice(["wait", "wait", "skip", "replace"])
    checkpointer = residency.Checkpointer(
        folder,
        keep=keep,
        max_in_flight=chance.choice([1, 1, 2, 3]),
        policy=policy,
        verify=chance.choice(["gate", "full", "read"]),
        spare=chance.choice([None, "all", 0, "16KiB"]),
    )
    moments: dict[int, dict[str, Any]] = {}
    calls: list[tuple[residency.types.Save, float | None]] = []
    with checkpointer:
        if chance.random() < 0.3:
            checkpointer.prepare(run.state)
        number = chance.choice([0, 0, 99999997])
        for _ in range(chance.randint(1, 5)):
            for _ in range(chance.randint(0, 2)):
                run.step()
            loss = chance.choice([None, float("nan"), chance.random(), chance.random()])
            metrics = None if loss is None else {"loss": loss, "other": 1}
            then = run.moment()
            snap = residency.snapshot(run.state) if chance.random() < 0.2 else None
            save = checkpointer.save(number, run.state, metrics=metrics)
            moments[len(calls)] = then
            calls.append((save, loss))
            for _ in range(chance.randint(0, 2)):
                run.step()
            if chance.random() < 0.7:
                run.scramble(chance)
            if chance.random() < 0.3:
                save.wait()
                assert save.is_done()
            if snap is not None:
                tree = snap.tree
                assert not differing(digest(run_like(tree)), without_generators(then))
                del tree, snap
            number += chance.choice([0, 1, 1, 1, 7])
        checkpointer.wait()
        done = [(at, save, loss) for at, (save, loss) in enumerate(calls) if not save.is_skipped]
        assert policy != "wait" or len(done) == len(calls)
        assert calls[-1][0].is_skipped is False or policy == "skip"
        steps = checkpointer.steps()
        assert steps == expected_steps([(save.step, loss) for _, save, loss in done], keep)
        truth = {save.step: moments[at] for at, save, _ in done}
        shown = os.readlink(folder / "latest")
        assert shown == f"step-{done[-1][1].step:08d}"
        for step in chance.sample(steps, min(2, len(steps))):
            check_restore(checkpointer, run, seed, step, truth[step], chance)
            if chance.random() < 0.5:
                check_readers(folder / f"step-{step:08d}", run, truth[step], chance)
        step = chance.choice(steps)
        check_load_into(folder / f"step-{step:08d}", folder, run, truth[step])
    there = {path.name for path in folder.iterdir()} - {".lock", "latest"}
    assert there == {f"step-{step:08d}" for step in steps}
    if chance.random() < 0.3:
        listed = json.loads(command("list", str(folder)).stdout)
        assert [save["step"] for save in listed["saves"]] == steps
        verified = command("verify", str(folder))
        assert verified.returncode == 0, verified
        assert json.loads(verified.stdout)["whole"] is True


def run_like(tree: Any) -> dict[str, Any]:
    """Names a snapshot's tree, which has state dicts, as a digest names the objects."""

    class Holder:
        def __init__(self, value: Any) -> None:
            self.value = value

        def state_dict(self) -> Any:
            return self.value

    parts = ("model", "optimizer", "scheduler", "scaler")
    return {name: Holder(value) if name in parts else value for name, value in tree.items()}


def without_generators(moment: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in moment.items() if name != "generators"}


def check_restore(
    checkpointer: residency.Checkpointer,
    run: Run,
    seed: int,
    step: int,
    then: dict[str, Any],
    chance: random.Random,
) -> None:
    """Restores into the trained objects or into fresh ones, and compares bits and identity."""
    if chance.random() < 0.5:
        run = Run(seed, run.device, offload=chance.random() < 0.5)
        if chance.random() < 0.3:
            run.step()
    before = {name: (id(t), t.stride(), t.data_ptr()) for name, t in run.bag.tensors.items()}
    weights = [(id(p), p.requires_grad) for p in run.net.parameters()]
    kept = random.getstate()
    assert checkpointer.restore(run.state, step=step, eager=chance.random() < 0.3) == step
    found = run.moment()
    random.setstate(kept)
    assert not differing(found, then)
    after = {name: (id(t), t.stride(), t.data_ptr()) for name, t in run.bag.tensors.items()}
    assert after == before
    assert weights == [(id(p), p.requires_grad) for p in run.net.parameters()]
    assert run.net.last.weight is run.net.first.weight
    run.step()


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    before = held()
    yield
    after = held()
    assert after == before


def test_a_restore_is_the_moment_of_its_save(
    torture: Torture, device: torch.device, root: Path
) -> None:
    def judge(chance: random.Random) -> None:
        place = root / "round"
        place.mkdir()
        try:
            with nothing_left():
                judge_run(chance, place, device)
        finally:
            shutil.rmtree(place)

    warm = root / "round"
    warm.mkdir()
    judge_run(random.Random(1), warm, device)  # what the first use alone makes, such as threads
    shutil.rmtree(warm)
    torture(judge)
