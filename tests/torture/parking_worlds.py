"""Small realistic trainings, drawn at random: what one run of them has, and how it trains.

Two of them from one plan are the same training; see ``parking_program.py``.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import torch
from framework_lab import optimizer_picture, random_states
from random_states import digest
from torch import Tensor, nn

import residency

WIDTH = 24
FEW = {"lr": 1e-2}
CLASSES: dict[str, list[dict[str, Any]]] = {
    "AdamW": [
        FEW,
        FEW | {"foreach": False},
        FEW | {"fused": True},
        FEW | {"capturable": True},
        FEW | {"amsgrad": True},
    ],
    "Adam": [FEW, FEW | {"weight_decay": 0.1}],
    "SGD": [FEW, FEW | {"momentum": 0.9}, FEW | {"momentum": 0.9, "nesterov": True}],
    "RMSprop": [FEW | {"centered": True, "momentum": 0.5}],
    "NAdam": [FEW, FEW | {"foreach": False}],
    "Adagrad": [FEW],
    "Adafactor": [FEW],
    "ASGD": [FEW],
    "Adamax": [FEW],
    "Rprop": [FEW],
    "Muon": [FEW],
}


def draw_training(chance: random.Random) -> dict[str, Any]:
    """Draws what both runs have in common."""
    name = chance.choice([*CLASSES, "AdamW", "AdamW", "LBFGS"])
    precision = "fp32" if name == "LBFGS" else chance.choice(["fp32", "fp32", "bf16", "fp16"])
    return {
        "seed": chance.randrange(1 << 30),
        "model": chance.choice(["layers", "images", "words", "adapters", "recurrent"]),
        "hidden": chance.choice([8, 33, 96, 300]),
        "dtype": chance.choice(["float32"] * 4 + ["float64", "bfloat16"])
        if precision == "fp32" and name not in {"Adafactor", "Muon", "LBFGS"}
        else "float32",
        "optimizer": name,
        "options": {"lr": 0.1, "history_size": 4}
        if name == "LBFGS"
        else chance.choice(CLASSES[name]),
        "groups": name != "LBFGS" and chance.random() < 0.5,
        "frozen": chance.random() < 0.3,
        "precision": precision,
        "clip": chance.choice([None, 0.5]),
        "accumulate": chance.choice([1, 1, 2, 3]),
        "schedule": chance.choice([None, "lambda", "plateau", "cycle"]),
        "infinite": chance.random() < 0.3,
        "steps": chance.randint(2, 5),
        "zero": chance.choice([True, True, False]),
    }


def draw_offload(chance: random.Random, plan: dict[str, Any]) -> dict[str, Any] | None:
    """Draws whether, and how, our run has the state of its optimizers on the host."""
    if plan["optimizer"] == "LBFGS" or "capturable" in plan["options"] or chance.random() < 0.6:
        return None
    return {
        "resident": chance.choice([0, 0, 3000, "20KiB", "1MiB"]),
        "bucket": chance.choice([4096, "16KiB", "128MiB"]),
        "slots": chance.choice([2, 3]),
        "pin": chance.random() < 0.8,
    }


class Words(nn.Module):
    """A tiny language model whose head is its embedding."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, hidden, 0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        place = (x[:, :6].float().abs() * 10).long() % 40
        return self.head(self.block(self.embedding(place)))[:, -1]  # type: ignore[no-any-return]


class Adapters(nn.Module):
    """A frozen base with two small matrices beside it."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, 40))
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, 40, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH // 4, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 40)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x.view(len(x), 4, -1))[0][:, -1])  # type: ignore[no-any-return]


def model_of(plan: dict[str, Any]) -> nn.Module:
    hidden = plan["hidden"]
    model: nn.Module
    match plan["model"]:
        case "words":
            model = Words(hidden)
        case "adapters":
            model = Adapters(hidden)
        case "recurrent":
            model = Recurrent(hidden)
        case "images":
            model = nn.Sequential(
                nn.Unflatten(1, (2, 3, 4)),
                nn.Conv2d(2, hidden // 4, 3, padding=1),
                nn.BatchNorm2d(hidden // 4),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(hidden // 4 * 12, 40),
            )
        case _:
            model = nn.Sequential(
                nn.Linear(WIDTH, hidden),
                nn.BatchNorm1d(hidden),
                nn.Dropout(0.2),
                nn.Tanh(),
                nn.Linear(hidden, 40),
            )
    if plan["frozen"]:
        next(module for module in model.modules() if isinstance(module, nn.Linear)).requires_grad_(
            False
        )
    return model.to("cuda", getattr(torch, plan["dtype"]))


class World:
    """One run: a model, an average of it, a reference, optimizers, and the rest of a loop."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        torch.manual_seed(plan["seed"])
        self.model = model_of(plan)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.reference = copy.deepcopy(self.model).requires_grad_(False)
        self.on_host = nn.Linear(3, 3)
        self.optimizers = self._optimizers()
        self.scaler = torch.amp.GradScaler("cuda", 64.0, enabled=plan["precision"] == "fp16")
        self.schedules = [self._schedule(optimizer) for optimizer in self.optimizers]
        self.kept: list[Tensor] = []
        self.log: list[Any] = []

    def _optimizers(self) -> list[Any]:
        plan = self.plan
        used = [p for p in self.model.parameters() if p.requires_grad]
        rest: list[nn.Parameter] = []
        if plan["optimizer"] == "Muon":
            rest = [p for p in used if p.ndim != 2]
            used = [p for p in used if p.ndim == 2]
        made = []
        if used:
            cut = len(used) // 2 if plan["groups"] else 0
            groups = [{"params": used[cut:]}]
            if cut:
                groups.append({"params": used[:cut], "lr": 3e-3})
            made.append(getattr(torch.optim, plan["optimizer"])(groups, **plan["options"]))
        if rest:
            made.append(torch.optim.AdamW(rest, lr=1e-2))
        return made

    def _schedule(self, optimizer: Any) -> Any:
        kinds = torch.optim.lr_scheduler
        match self.plan["schedule"]:
            case "lambda":
                return kinds.LambdaLR(optimizer, lambda step: 0.9**step)
            case "plateau":
                return kinds.ReduceLROnPlateau(optimizer, patience=0)
            case "cycle":
                return kinds.CosineAnnealingLR(optimizer, 5)
        return None

    def owners(self) -> dict[str, Any]:
        """Returns what may be parked, by name."""
        found = {
            "model": self.model,
            "average": self.average,
            "reference": self.reference,
            "host": self.on_host,
        }
        return found | {f"optimizer {i}": each for i, each in enumerate(self.optimizers)}

    # How it trains.

    def batch(self, chance: random.Random) -> Tensor:
        generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
        drawn = torch.randn(4, WIDTH, generator=generator)
        return drawn.to("cuda", getattr(torch, self.plan["dtype"]))

    def out(self, x: Tensor, model: nn.Module | None = None) -> Tensor:
        kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.plan["precision"])
        with torch.autocast("cuda", kind or torch.bfloat16, enabled=kind is not None):
            return (model or self.model)(x)  # type: ignore[no-any-return]

    def loss(self, chance: random.Random) -> Tensor:
        loss = self.out(self.batch(chance)).float().square().mean()
        if self.plan["infinite"] and self.scaler.is_enabled() and chance.random() < 0.3:
            loss = loss * float("inf")
        self.log.append(loss.detach().clone())
        return self.scaler.scale(loss)

    def step(self, chance: random.Random) -> None:
        """Steps each optimizer; gradients are there."""
        seed = chance.randrange(1 << 30)
        if self.plan["optimizer"] == "LBFGS":

            def closure() -> Tensor:
                self.zero()
                loss = self.loss(random.Random(seed))
                loss.backward()
                return loss

            self.optimizers[0].step(closure)
            return
        ready = [o for o in self.optimizers if any(p.grad is not None for p in trained_by(o))]
        for optimizer in ready:  # a body may have dropped the gradients of this step
            if self.plan["clip"]:
                self.scaler.unscale_(optimizer)
        if self.plan["clip"]:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.plan["clip"])
        for optimizer in ready:
            self.scaler.step(optimizer)
        if ready:
            self.scaler.update()

    def schedule(self, metric: float) -> None:
        for schedule in self.schedules:
            if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
                schedule.step(metric)
            elif schedule is not None:
                schedule.step()

    def zero(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=self.plan["zero"])

    # What it looks like.

    def state(self) -> dict[str, Any]:
        """Returns what a save has."""
        named: dict[str, Any] = {"model": self.model, "average": self.average}
        named |= {f"optimizer {i}": each for i, each in enumerate(self.optimizers)}
        return named | {"scaler": self.scaler} if self.scaler.is_enabled() else named

    def saved_picture(self) -> dict[str, Any]:
        """Returns the values of what a save has."""
        found = digest({"model": self.model, "average": self.average})
        for index, optimizer in enumerate(self.optimizers):
            seen = optimizer_picture(optimizer)
            found |= {f"optimizer {index} {key}": value for key, value in seen.items()}
        return found

    def picture(self) -> dict[str, Any]:
        """Returns all that the run has, as plain values."""
        schedules = [each.state_dict() for each in self.schedules if each is not None]
        grads = {name: p.grad for name, p in self.model.named_parameters()}
        for each in schedules:
            each.pop("lr_lambdas", None)
        rest = {
            "reference": self.reference,
            "schedules": schedules,
            "scaler": self.scaler.state_dict(),
            "gradients": grads,
            "kept": list(self.kept),
            "log": list(self.log),
            "now": random_states(),
            "hooked": [p.requires_grad for p in self.model.parameters()],
        }
        return self.saved_picture() | digest(rest)


def trained_by(optimizer: Any) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors of a tree."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)


def tensors_of(owner: Any) -> list[Tensor]:
    """Returns a module's parameters, gradients and buffers, or an optimizer's state."""
    if isinstance(owner, nn.Module):
        grads = [p.grad for p in owner.parameters() if p.grad is not None]
        return [*owner.parameters(), *owner.buffers(), *grads]
    return list(tensors_in([dict(state) for state in owner.state.values()]))


def device_bytes(owners: list[Any]) -> int:
    """Returns the device bytes of what owners have, each storage once and rounded to 512."""
    sizes = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for owner in owners
        for tensor in tensors_of(owner)
        if tensor.device.type == "cuda"
    }
    return sum(-(-size // 512) * 512 for size in sizes.values())


def offload(world: World, settings: dict[str, Any]) -> None:
    for optimizer in world.optimizers:
        residency.offload_optimizer(optimizer, **settings)
