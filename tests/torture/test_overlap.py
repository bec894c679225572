"""Random small trainings with ``overlap=True``, judged bit for bit by stock torch's run of each.

A program draws as it goes, from a generator of its own: so every run of a seed does the same, and
where one run calls the library, stock torch's does what the documentation says is the same.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from training_programs import LR, Program, host_copy, noise, nothing_left, same, some

import residency

KINDS = ("mlp", "conv", "block", "twice", "tied", "gan", "frozen")
ACTIONS = (
    *("evaluate", "read", "change", "load", "snapshot", "restore", "park", "on_and_off"),
    *("failure", "away", "add_group"),
)
OPTIMIZERS = ("AdamW", "AdamW", "SGD", "NAdam", "Adagrad", "Adafactor")


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError


class Net(nn.Module):
    """Is a chain of parts, which may be recomputed, and which fails where it is told to."""

    def __init__(self, kind: str, width: int, chance: random.Random) -> None:
        super().__init__()
        self.fail, self.fail_at, self.recompute, self.conv = "", 0, False, kind == "conv"
        depth = chance.randint(2, 5)

        parts: list[Any] = []
        for _ in range(depth):
            wide = nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
            planes = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()
            layer = nn.TransformerEncoderLayer(width, 4, 64)
            parts += [layer] if kind == "block" else []
            parts.append(nn.Sequential(*(planes if kind == "conv" else wide)))
        if kind == "twice":
            parts.insert(chance.randint(1, depth), parts[0])
        if kind == "tied":
            parts[-1][2].weight = parts[0][2].weight
        self.parts = nn.ModuleList(parts)
        self.late = nn.Linear(width, width)  # in no optimizer at first
        self.late.requires_grad_(False)
        if kind == "frozen":
            for part in chance.sample(parts, depth // 2):
                part.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.conv:
            x = x.view(x.shape[0], 16, -1, 4)
        for index, part in enumerate(self.parts):
            if self.fail and index == self.fail_at:
                if self.fail == "forward":
                    raise ZeroDivisionError
                x = Fails.apply(x)
            again = self.recompute and torch.is_grad_enabled()
            x = checkpoint(part, x, use_reentrant=False) if again else part(x)
        return self.late(x.reshape(x.shape[0], -1))


class Run:
    """Is one run of a seed: stock torch's, or one with offloaded optimizers."""

    def __init__(self, seed: int, device: torch.device, folder: Path, mode: str) -> None:
        self.chance = chance = random.Random(seed)
        self.device, self.folder, self.mode = device, folder, mode
        self.trace: list[tuple[str, Any]] = []
        self.log: list[str] = []
        self.peak = self.bound = 0
        self.schedulers: list[Any] = []
        gc.collect()
        torch.accelerator.empty_cache()
        torch.manual_seed(seed)
        self.start = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        kind, self.name = chance.choice(KINDS), chance.choice(OPTIMIZERS)
        self.width = 64 if kind == "conv" else chance.choice([32, 64, 128])
        self.nets = [Net(kind, self.width, chance).to(device)]
        if kind == "gan":
            self.nets.append(Net("mlp", self.width, chance).to(device))
        if kind == "conv":
            self.width *= 4
            self.nets[0].late = nn.Linear(self.width, 8).to(device).requires_grad_(False)
        recompute = some(chance, 0.3)
        for net in self.nets:
            net.recompute = recompute
        self.optimizers = [self.made(net) for net in self.nets]
        self.scaler = torch.amp.GradScaler(device.type, init_scale=16.0, enabled=some(chance, 0.3))
        self.clips, self.waits = some(chance, 0.4), some(chance, 0.3)
        early, scheduled = some(chance, 0.5), some(chance, 0.6)
        for late in (False, True):
            if late == early:
                for each in self.optimizers:
                    self.offload(each)
            elif scheduled:
                maker = torch.optim.lr_scheduler.StepLR
                self.schedulers = [maker(each, 2, 0.5) for each in self.optimizers]
        self.log.append(f"{kind} {self.name} {recompute=} {self.scaler.is_enabled()=} {scheduled=}")

    def made(self, net: Net) -> Any:
        late = {id(each) for each in net.late.parameters()}
        parameters = [each for each in net.parameters() if id(each) not in late]
        settings: dict[str, Any] = {"lr": LR.get(self.name, 0.01) / 4}
        if self.name == "SGD":
            settings["momentum"] = 0.9
        kinds = [{}, {}, {"foreach": True}, {"foreach": False}]
        if self.name in {"AdamW", "Adagrad"}:
            kinds.append({"fused": True})
        settings |= self.chance.choice(kinds)
        cut = self.chance.randint(1, len(parameters) - 1)
        groups: list[Any] = [{"params": parameters[:cut]}]
        groups.append({"params": parameters[cut:], "lr": settings["lr"] / 2, "weight_decay": 0.1})
        return getattr(torch.optim, self.name)(groups, **settings)

    def offload(self, optimizer: Any) -> None:
        bucket = self.chance.choice([4096, 20000, "64KiB", "256KiB", None])
        options = {"bucket": bucket, "slots": self.chance.randint(1, 4)}
        stays = self.chance.choice([0, 0, 30000, "auto"])
        options |= {"pin": some(self.chance, 0.9), "resident": stays}
        self.log.append(f"offload {options}")
        if self.mode != "stock":
            residency.offload_optimizer(optimizer, overlap=self.mode == "overlap", **options)
        size = Program.size(bucket or "128MiB")
        largest = max(p.numel() for group in optimizer.param_groups for p in group["params"])
        if self.name == "Adafactor":
            size = max(size, 8 * largest + 4096)
        # What stays by "auto" has the card for its bound.
        self.bound += 1 << 40 if stays == "auto" else Program.size(stays)
        self.bound += options["slots"] * size

    def batch(self) -> torch.Tensor:
        size = self.chance.choice([4, 8, 32, 128, 256])
        values = noise(self.chance.randrange(1 << 30), (size, self.width), torch.float32)
        return values.pin_memory().to(self.device, non_blocking=True)

    def backward(self, which: int, bad: bool) -> None:
        x = self.batch()
        y = self.nets[0](x)
        if len(self.nets) > 1:
            y = self.nets[1](y if which == 0 else y.detach())
            y = -y if which == 0 else y - self.nets[1](self.batch()).mean()
        loss = y.square().mean() * (float("inf") if bad else 1.0)
        del x, y
        self.scaler.scale(loss).backward()
        self.trace.append(("loss", loss.detach()))
        if self.waits:
            loss.item()
        self.peak = max(self.peak, torch.accelerator.max_memory_allocated() - self.start)

    def iteration(self) -> None:
        chance = self.chance
        self.log.append("iteration")
        for which, optimizer in reversed(list(enumerate(self.optimizers))):
            bad = self.scaler.is_enabled() and some(chance, 0.15)
            for _ in range(chance.choice([1, 1, 2, 3])):
                self.backward(which, bad)
            if not some(chance, 0.08):
                if self.clips:
                    self.scaler.unscale_(optimizer)
                    norm = nn.utils.clip_grad_norm_(self.nets[which].parameters(), 0.5)
                    self.trace.append(("norm", norm))
                self.scaler.step(optimizer)
                self.scaler.update()
                self.peak = max(self.peak, torch.accelerator.max_memory_allocated() - self.start)
            for each in self.optimizers if some(chance, 0.5) else [optimizer]:
                each.zero_grad(set_to_none=some(chance, 0.6))
        for scheduler in self.schedulers:
            scheduler.step()

    def evaluate(self) -> None:
        net = self.chance.choice(self.nets)
        net.eval()
        with torch.no_grad():
            self.trace.append(("evaluation", net(self.batch())))
        net.train()

    def values(self, optimizer: Any) -> dict[str, Any]:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        state = optimizer.state
        return host_copy({"p": parameters, "s": [dict(state.get(each, {})) for each in parameters]})

    def read(self) -> None:
        self.trace.append(("state", self.values(self.chance.choice(self.optimizers))))

    def change(self) -> None:
        optimizer = self.chance.choice(self.optimizers)
        state = optimizer.state
        owners = [p for group in optimizer.param_groups for p in group["params"] if state.get(p)]
        if not owners:
            return
        entry = state[self.chance.choice(owners)]
        names = sorted(k for k in entry if torch.is_tensor(entry[k]) and entry[k].numel() > 1)
        for key in names[:1]:
            if some(self.chance, 0.5):
                entry[key].mul_(0.5)
            else:
                entry[key] = torch.full_like(entry[key], 0.25, device=self.device)

    def load(self) -> None:
        optimizer = self.chance.choice(self.optimizers)
        saved = copy.deepcopy(optimizer.state_dict())
        if some(self.chance, 0.5):
            self.iteration()
        optimizer.load_state_dict(saved)

    def snapshot(self) -> None:
        which = self.chance.randrange(len(self.nets))
        tree = {"m": self.nets[which], "o": self.optimizers[which]}
        if self.mode == "stock":
            found = host_copy({key: dict(each.state_dict()) for key, each in tree.items()})
        else:
            found = residency.snapshot(tree).tree
        self.iteration()
        self.trace.append(("snapshot", {"m": dict(found["m"]), "o": found["o"]["state"]}))

    def restore(self) -> None:
        trees = {f"m{i}": each for i, each in enumerate(self.nets)}
        trees |= {f"o{i}": each for i, each in enumerate(self.optimizers)}
        place = self.folder / str(self.chance.randrange(1 << 40))
        more = self.chance.randint(0, 2)
        if self.mode == "stock":
            kept = {key: copy.deepcopy(each.state_dict()) for key, each in trees.items()}
            for _ in range(more):
                self.iteration()
            for key, each in trees.items():
                each.load_state_dict(kept[key])
            return
        with residency.Checkpointer(place) as checkpointer:
            checkpointer.save(1, trees, rng=False)
            for _ in range(more):
                self.iteration()
            checkpointer.wait()
            assert checkpointer.restore(trees) == 1

    def park(self) -> None:
        size = self.chance.choice([1, 1 << 16])
        if self.mode == "stock":
            return
        with residency.parked(*self.nets, *self.optimizers):
            torch.ones(size, device=self.device).sum().item()

    def on_and_off(self) -> None:
        optimizer = self.chance.choice(self.optimizers)
        between = some(self.chance, 0.5)
        if self.mode != "stock":
            residency.onload_optimizer(optimizer)
        if between:
            self.iteration()
        self.offload(optimizer)

    def failure(self) -> None:
        net, kind = self.nets[0], self.chance.choice(["forward", "backward"])
        net.fail, net.fail_at = kind, self.chance.randrange(len(net.parts))
        with contextlib.suppress(ZeroDivisionError):
            self.backward(0, False)
        net.fail = ""
        if some(self.chance, 0.6):
            self.optimizers[0].zero_grad()

    def away(self) -> None:
        net = self.chance.choice(self.nets)
        net.cpu()
        net.to(self.device)

    def add_group(self) -> None:
        net = self.nets[0]
        if not net.late.weight.requires_grad:
            net.late.requires_grad_(True)
            self.optimizers[0].add_param_group({"params": list(net.late.parameters())})

    def all(self) -> Run:
        try:
            for _ in range(self.chance.randint(5, 12)):
                for _ in range(self.chance.choice([1, 2, 4])):
                    self.iteration()
                if some(self.chance, 0.5):
                    name = self.chance.choice(ACTIONS)
                    self.log.append(name)
                    with torch.set_grad_enabled(name not in {"change", "read"}):
                        getattr(self, name)()
            for optimizer in self.optimizers:
                self.trace.append(("end", self.values(optimizer)))
            self.trace = [(key, host_copy(value)) for key, value in self.trace]
        except BaseException as error:
            error.add_note("\n".join([self.mode, *self.log]))
            raise
        for each in (self.nets, self.optimizers, self.schedulers):
            each.clear()
        del self.scaler
        return self


@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")  # a first step was skipped
@pytest.mark.sim_device(capacity=1 << 30, schedule="late")
def test_overlap_changes_no_bit(
    sim_device: torch.device, torture: Callable[..., None], tmp_path: Path, caplog: Any
) -> None:
    def judge(chance: random.Random) -> None:
        seed = chance.randrange(1 << 30)
        with nothing_left(chance):
            modes = "stock", "overlap"
            stock, ours = (Run(seed, sim_device, tmp_path, mode).all() for mode in modes)
            assert "without overlap" not in caplog.text, (caplog.text, ours.log)
            for (key, theirs), (_, mine) in zip(stock.trace, ours.trace, strict=True):
                same(mine, theirs, f"{key} of {ours.log}")
            assert ours.peak <= stock.peak + ours.bound + 65536, (ours.peak, stock.peak)

    torture(judge)
