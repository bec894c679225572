"""Random training programs that run twice: with an offloaded optimizer, and on stock torch.

A program is an optimizer, its settings, parameters, and steps of all kinds; both runs are compared
bit for bit, and the device bytes of each step with the bound of ``offload_optimizer``'s docstring.
"""

from __future__ import annotations

import copy
import gc
import io
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import residency
from residency import sim

LR = {"Adafactor": 0.05, "Muon": 0.01, "Adadelta": 0.9}
FUSED = {"Adam", "AdamW", "SGD", "Adagrad"}
WHOLE = {"Adafactor", "Muon"}
CLASSES = (
    *("AdamW", "Adam", "SGD", "Adagrad", "RMSprop", "Adadelta", "NAdam", "RAdam"),
    *("Adamax", "ASGD", "Rprop", "Adafactor", "Muon"),
)


def some(chance: random.Random, probability: float) -> bool:
    return chance.random() < probability


def noise(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Returns the same host numbers for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    host = tensor.detach().cpu().contiguous()
    return host.dtype, tuple(host.shape), host.reshape(-1).view(torch.uint8).numpy().tobytes()


def host_copy(value: Any) -> Any:
    """Returns a tree whose tensors are copies on the host."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: host_copy(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(host_copy(each) for each in value)
    return value


def same(mine: Any, theirs: Any, where: str) -> None:
    """Compares two trees bit for bit; tensors by value, wherever they are."""
    if isinstance(theirs, torch.Tensor):
        assert isinstance(mine, torch.Tensor), where
        assert bits(mine) == bits(theirs), f"{where}: {mine} is not {theirs}"
    elif isinstance(theirs, dict):
        assert set(mine) == set(theirs), (where, list(mine), list(theirs))
        for key in theirs:
            same(mine[key], theirs[key], f"{where}.{key}")
    elif isinstance(theirs, (list, tuple)):
        assert len(mine) == len(theirs), where
        for index, pair in enumerate(zip(mine, theirs, strict=True)):
            same(*pair, f"{where}[{index}]")
    else:
        assert mine == theirs, (where, mine, theirs)


def settings_of(chance: random.Random, name: str) -> dict[str, Any]:
    """Draws an optimizer's settings."""
    settings: dict[str, Any] = {"lr": LR.get(name, 0.01)}
    if name not in {"Rprop"}:
        settings["weight_decay"] = chance.choice([0.0, 0.1])
    if name != "Muon":
        settings["maximize"] = some(chance, 0.3)
    if name in {"AdamW", "Adam"}:
        settings["amsgrad"] = some(chance, 0.4)
    if name == "SGD":
        settings["momentum"] = chance.choice([0.0, 0.9, 0.9])
        settings["nesterov"] = settings["momentum"] > 0 and some(chance, 0.5)
    if name == "RMSprop":
        settings |= {"momentum": chance.choice([0, 0.9]), "centered": some(chance, 0.5)}
    if name in {"NAdam", "RAdam"}:
        settings["decoupled_weight_decay"] = some(chance, 0.5)
    if name != "Muon":
        kind = chance.choice(["foreach", "fused", "loop", None])
        if kind == "fused" and name in FUSED:
            settings["fused"] = True
            if name == "SGD":  # stock's fused step fails where only some have a buffer yet
                settings |= {"momentum": 0.0, "nesterov": False}
        elif kind in {"foreach", "loop"}:
            settings["foreach"] = kind == "foreach"
    tensor_lr = name in {"AdamW", "Adam", "SGD"} and not settings.get("foreach")
    explicit = settings.get("fused") or settings.get("foreach") is False
    if tensor_lr and explicit and some(chance, 0.3):
        settings["lr"] = torch.tensor(settings["lr"])
    return settings


def shapes_of(chance: random.Random, name: str) -> list[tuple[tuple[int, ...], torch.dtype, bool]]:
    """Draws shapes, dtypes and whether the parameter is transposed; every shape twice at times."""
    result = []
    for _ in range(chance.randint(2, 6)):
        sides = [1, 3, 17, 64, 129]
        dimensions = 2 if name == "Muon" else chance.randint(0, 3)
        shape = tuple(
            chance.choice(sides[:4] if dimensions > 2 else sides) for _ in range(dimensions)
        )
        if some(chance, 0.06) and name not in WHOLE:
            shape = (0,)
        dtypes = [torch.float32] * 4 + [torch.bfloat16, torch.float16, torch.float64]
        if name in {"Adam", "AdamW", "SGD"}:
            dtypes.append(torch.complex64)
        dtype = chance.choice(dtypes[:5] if name in WHOLE else dtypes)
        turned = len(shape) == 2 and some(chance, 0.15)
        if name == "Adafactor":  # one dtype a group, as the docs ask for without `eps`
            dtype = result[0][1] if result else torch.float32
        result += [(shape, dtype, turned)] * chance.choice([1, 1, 2])
    return result


class World:
    """Is one run: parameters by number, an optimizer, and what the program keeps of it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.parameters: list[torch.nn.Parameter] = []
        self.optimizer: Any = None
        self.schedulers: list[Any] = []
        self.kept: list[tuple[str, torch.Tensor]] = []

    def add(self, seed: int, shape: tuple[int, ...], dtype: torch.dtype, turned: bool) -> None:
        data = noise(seed, shape, dtype).to(self.device)
        if turned:
            data = data.t().contiguous().t()
        self.parameters.append(torch.nn.Parameter(data))

    def module(self) -> torch.nn.Module:
        module = torch.nn.Module()
        for index, parameter in enumerate(self.parameters):
            module.register_parameter(f"p{index}", parameter)
        return module

    def load(self, saved: dict[str, Any]) -> None:
        """Loads a state dict; saved dtypes and ties stay, as the offloaded optimizer promises."""
        file = io.BytesIO()
        torch.save(saved["state"], file)
        self.optimizer.load_state_dict(saved)
        if isinstance(self.optimizer, residency.OffloadedOptimizer):
            return
        order = [p for group in self.optimizer.param_groups for p in group["params"]]
        for place in ("cpu", self.device):
            file.seek(0)
            for index, state in torch.load(file, map_location=place).items():
                for key, value in state.items():
                    mine = key != "step" and (key == "mu_product") == (place == "cpu")
                    if isinstance(value, torch.Tensor) and mine:
                        self.optimizer.state[order[index]][key] = value

    def values(self) -> dict[str, Any]:
        state = self.optimizer.state
        return {
            "parameters": list(self.parameters),
            "gradients": [p.grad for p in self.parameters],
            "state": [dict(state[p]) if p in state else {} for p in self.parameters],
            "groups": [
                {
                    key: value
                    for key, value in group.items()
                    if key not in {"params", "differentiable"}
                }
                for group in self.optimizer.param_groups
            ],
        }


class Program:
    """Is a random program in two worlds, ours and stock torch's."""

    def __init__(self, chance: random.Random, device: torch.device, alone: bool = True) -> None:
        self.chance, self.device, self.alone = chance, device, alone
        self.name = chance.choice(CLASSES)
        self.settings = settings_of(chance, self.name)
        shapes = shapes_of(chance, self.name)
        if any(dtype.is_complex for _, dtype, _ in shapes):
            self.settings.pop("fused", None)
        self.ours, self.stock = World(device), World(device)
        self.worlds = (self.ours, self.stock)
        self.log: list[str] = [f"{self.name} {self.settings} {shapes}"]
        for spec in shapes:
            seed = chance.randrange(1 << 30)
            for world in self.worlds:
                world.add(seed, *spec)
        self.tied = some(chance, 0.15) and not self.settings.get("fused")
        if self.tied:
            for world in self.worlds:
                world.parameters.append(torch.nn.Parameter(world.parameters[0].data))
        indices = list(range(len(self.ours.parameters)))
        cut = chance.randint(1, len(indices))
        for world in self.worlds:
            groups = [{"params": [world.parameters[i] for i in indices[:cut]]}]
            if cut < len(indices):
                rest = [world.parameters[i] for i in indices[cut:]]
                groups.append({"params": rest, "lr": LR.get(self.name, 0.01) * 0.5})
            settings = copy.deepcopy(self.settings)
            if isinstance(settings["lr"], torch.Tensor):
                groups = [{"params": group["params"]} for group in groups]
            world.optimizer = getattr(torch.optim, self.name)(groups, **settings)
        if some(chance, 0.3):
            self.step()
        self.offload()

    # What the program does to both worlds.

    def offload(self) -> None:
        chance = self.chance
        self.options = {
            "bucket": chance.choice([4096, 8192, 20000, "64KiB", "1MiB"]),
            "slots": chance.randint(1, 4),
            "resident": chance.choice([0, 0, 0, 3000, "64KiB", "64MiB"]),
            "pin": some(chance, 0.8),
        }
        self.log.append(f"offload {self.options}")
        residency.offload_optimizer(self.ours.optimizer, **self.options)
        assert isinstance(self.ours.optimizer, residency.OffloadedOptimizer)
        assert isinstance(self.ours.optimizer, getattr(torch.optim, self.name))

    def gradients(self) -> None:
        seed, missing = self.chance.randrange(1 << 30), self.chance.choice([0.0, 0.0, 0.3, 0.9])
        gone = {i for i in range(len(self.ours.parameters)) if some(self.chance, missing)}
        shared = some(self.chance, 0.05) and not self.settings.get("fused")
        for world in self.worlds:
            seen: dict[Any, torch.Tensor] = {}
            for index, parameter in enumerate(world.parameters):
                if index in gone:
                    parameter.grad = None
                    continue
                shape = tuple(parameter.shape)
                values = noise(seed + index, shape, parameter.dtype)
                gradient = torch.empty_like(parameter).copy_(values).detach()
                if shared:
                    gradient = seen.setdefault((shape, parameter.dtype), gradient)
                parameter.grad = gradient
        if shared:
            self.log.append("shared gradients")

    def state_bytes(self) -> int:
        """Returns what the largest parameter that moves whole has of state, rounded."""
        sizes = []
        for parameter in self.stock.parameters:
            whole = self.name in WHOLE or not parameter.is_contiguous()
            if whole or self.tied:
                state = self.stock.optimizer.state.get(parameter, {}).values()
                tensors = [each for each in state if isinstance(each, torch.Tensor)]
                sizes.append(sum(-(-each.nbytes // 512) * 512 for each in tensors))
        return (sum(sizes) if self.tied else max(sizes, default=0)) if sizes else 0

    def measured(self, world: World) -> tuple[int, int, int]:
        """Steps; returns the peak over what there was, what stayed, and the peak over that."""
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        world.optimizer.step()
        after = torch.accelerator.memory_allocated()
        peak = torch.accelerator.max_memory_allocated()
        return peak - before, after - before, peak - max(after, before)

    def step(self) -> None:
        self.gradients()
        if not self.alone or not isinstance(self.ours.optimizer, residency.OffloadedOptimizer):
            for world in self.worlds:
                world.optimizer.step()
            return
        _, _, scratch = self.measured(self.stock)
        shared = len({id(p.grad) for p in self.ours.parameters}) < len(self.ours.parameters)
        peak, stayed, _ = self.measured(self.ours)
        resident, bucket = (self.size(self.options[key]) for key in ("resident", "bucket"))
        bound = resident + self.options["slots"] * max(bucket, self.state_bytes())
        if not shared:
            assert peak <= bound + scratch + 8192, (
                f"{peak} bytes, bound {bound} and {scratch} of scratch"
            )
        assert stayed <= resident, (stayed, resident)
        statistics = self.ours.optimizer.statistics()
        assert statistics.resident_bytes <= resident, statistics

    @staticmethod
    def size(value: int | str) -> int:
        units = {"KiB": 1 << 10, "MiB": 1 << 20}
        return value if isinstance(value, int) else int(value[:-3]) * units[value[-3:]]

    def closure(self) -> None:
        weight = self.chance.random()
        results = []
        for world in self.worlds:

            def evaluate(world: World = world) -> torch.Tensor:
                world.optimizer.zero_grad()
                parts = [(p.abs().float() ** 2).sum() for p in world.parameters if p.requires_grad]
                loss = sum(parts, torch.zeros((), device=self.device)) * weight
                if loss.requires_grad:
                    loss.backward()
                return loss.detach()

            results.append(world.optimizer.step(evaluate))
        same(results[0], results[1], "loss")

    def clipped(self) -> None:
        self.gradients()
        norm = self.chance.choice([0.1, 1e9])
        for world in self.worlds:
            groups: dict[Any, list[Any]] = {}
            for parameter in world.parameters:
                groups.setdefault(parameter.dtype, []).append(parameter)
            for each in groups.values():
                torch.nn.utils.clip_grad_norm_(each, norm)
            world.optimizer.step()

    def scaled(self) -> None:
        """Steps with a GradScaler, at times with an infinity in a gradient."""
        kinds = {p.dtype for p in self.ours.parameters}
        if kinds & {torch.float16, torch.complex64}:
            return
        bad = some(self.chance, 0.4)
        self.gradients()
        victim = self.chance.randrange(len(self.ours.parameters))
        scales = []
        for world in self.worlds:
            scaler = torch.amp.GradScaler(self.device.type, init_scale=8.0)
            scaler.scale(torch.ones((), device=self.device))
            gradient = world.parameters[victim].grad
            if bad and gradient is not None:
                gradient.fill_(float("inf"))
            if all(p.grad is None for p in world.parameters):
                return
            if self.settings.get("fused") is None and some(random.Random(victim), 0.5):
                scaler.unscale_(world.optimizer)
            scaler.step(world.optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert scales[0] == scales[1]

    def schedule(self) -> None:
        kind = self.chance.choice(["StepLR", "ExponentialLR", "CosineAnnealingLR"])
        arguments = {"StepLR": (1, 0.5), "ExponentialLR": (0.9,), "CosineAnnealingLR": (5,)}[kind]
        for world in self.worlds:
            if not world.schedulers:
                made = getattr(torch.optim.lr_scheduler, kind)(world.optimizer, *arguments)
                world.schedulers.append(made)
        self.step()
        for world in self.worlds:
            world.schedulers[0].step()


def compare(program: Program) -> None:
    same(program.ours.values(), program.stock.values(), "world")
    for mine, theirs in zip(program.ours.kept, program.stock.kept, strict=True):
        same(mine[1], theirs[1], f"kept {mine[0]}")


def held() -> tuple[int, int]:
    gc.collect()
    torch.accelerator.synchronize()
    torch.sim.clear_workspaces()  # which matrix products keep
    return torch.accelerator.memory_allocated(), sim.pinned_memory_stats()["used_bytes.current"]


@contextmanager
def nothing_left(chance: random.Random) -> Iterator[None]:
    """Checks races in half of the rounds, and that the device and page-locked bytes go back."""
    sim.enable(**(sim.settings() | {"check_races": some(chance, 0.5)}))
    before = held()
    yield
    assert held() == before, (held(), before)
