"""One rank that saves what a seed draws, or restores it into other layouts and compares.

``python layout_program.py save|restore RANK FOLDER SEED``. The tensors' values follow from the seed
alone; of models and optimizers the first rank leaves the whole values, as torch gathers them.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import residency

WAIT = 60.0
NUM_TENSORS = 10
SHAPES = [(4, 4), (5, 3), (1, 7), (3, 1), (2, 2), (8, 6), (7, 5), (0, 4), (6, 0), (9,), (2, 3, 5)]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64]
OPTIMIZERS: list[Any] = [
    lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
]


class Drawn:
    """The numbers of ranks that save and restore, and their layouts, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        self.ranks = {phase: chance.choice([1, 2, 3, 4]) for phase in ("save", "restore")}
        self.layouts: dict[str, list[tuple[bool, tuple[Placement, ...]]]] = {}
        self.shapes = [chance.choice(SHAPES) for _ in range(NUM_TENSORS)]
        self.dtypes = [chance.choice(DTYPES) for _ in range(NUM_TENSORS)]
        for phase, size in self.ranks.items():
            self.layouts[phase] = [self.layout(chance, shape, size) for shape in self.shapes]
        self.kinds = {phase: chance.choice(kinds(size)) for phase, size in self.ranks.items()}
        self.is_offloaded = {phase: chance.random() < 0.5 for phase in self.ranks}
        self.optimizer = chance.choice(OPTIMIZERS)
        self.num_steps = chance.choice([0, 1, 2])

    @staticmethod
    def layout(
        chance: random.Random, shape: tuple[int, ...], size: int
    ) -> tuple[bool, tuple[Placement, ...]]:
        """Draws whether the mesh is one of two times two, and a placement for each of its sides."""
        is_square = size == 4 and chance.random() < 0.5
        shards = [Shard(dim) for dim in range(len(shape))]
        return is_square, tuple(chance.choice([*shards, Replicate()]) for _ in range(1 + is_square))

    def value(self, index: int) -> Tensor:
        """Returns a whole tensor, whose elements differ where its dtype lets them."""
        shape = self.shapes[index]
        numbers = torch.arange(torch.Size(shape).numel()).reshape(shape) + 1 + 7 * index
        return (
            (numbers % 3 == 0)
            if self.dtypes[index] == torch.bool
            else numbers.to(self.dtypes[index])
        )


def kinds(size: int) -> list[str]:
    """Returns how a model may lie; torch's own row-wise parallel needs parts of one size."""
    return ["fsdp"] + ["tp"] * (size != 3) + ["hsdp", "both"] * (size == 4)


class Rank:
    """The meshes, the model and the optimizer of one process."""

    def __init__(self, phase: str, drawn: Drawn) -> None:
        size = drawn.ranks[phase]
        self.phase, self.drawn = phase, drawn
        self.line = init_device_mesh("cpu", (size,))
        self.square = (
            init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) if size == 4 else None
        )
        self.model = self.built(drawn.kinds[phase])
        self.optimizer = drawn.optimizer(self.model.parameters())
        if drawn.is_offloaded[phase]:
            residency.offload_optimizer(self.optimizer)

    def mesh(self, is_square: bool) -> DeviceMesh:
        mesh = self.square if is_square else self.line
        assert mesh is not None
        return mesh

    def tensors(self, *, filled: bool) -> dict[str, DTensor]:
        found = {}
        for index, (is_square, placements) in enumerate(self.drawn.layouts[self.phase]):
            whole = self.drawn.value(index)
            whole = whole if filled else torch.zeros_like(whole)
            found[f"t{index}"] = distribute_tensor(whole, self.mesh(is_square), placements)
        return found

    def built(self, kind: str) -> nn.Module:
        torch.manual_seed(0 if self.phase == "save" else 1)
        model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
        if kind in ("tp", "both"):
            mesh = self.mesh(True)["tp"] if kind == "both" else self.line
            parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if kind == "both":
            mesh = self.mesh(True)["dp"]
            fully_shard(model[0], mesh=mesh)
            fully_shard(model, mesh=mesh)
        if kind in ("fsdp", "hsdp"):
            fully_shard(model, mesh=self.mesh(kind == "hsdp"))
        return model

    def step(self, seed: int) -> None:
        data = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
        self.optimizer.zero_grad()
        self.model(data).square().sum().backward()
        self.optimizer.step()

    def state(self, tensors: dict[str, DTensor]) -> dict[str, Any]:
        return {"tensors": tensors, "model": self.model, "optimizer": self.optimizer}

    def wholes(self) -> dict[str, Tensor]:
        """Returns the whole values of all parameters and of their states."""
        found = {}
        for name, parameter in self.model.named_parameters():
            found[name] = whole(parameter)
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    found[f"{name} {key}"] = whole(value)
        return found


def whole(value: Tensor) -> Tensor:
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().cpu().clone()


def save(rank: Rank, folder: Path) -> None:
    for seed in range(rank.drawn.num_steps):
        rank.step(seed)
    with residency.Checkpointer(folder / "saves", timeout_seconds=WAIT) as checkpointer:
        checkpointer.save(1, rank.state(rank.tensors(filled=True))).wait()
    found = rank.wholes()
    if dist.get_rank() == 0:
        torch.save(found, folder / "wholes.pt")


def restore(rank: Rank, folder: Path) -> None:
    rank.step(99)  # what is restored replaces states, too
    tensors = rank.tensors(filled=False)
    with residency.Checkpointer(folder / "saves", timeout_seconds=WAIT) as checkpointer:
        checkpointer.restore(rank.state(tensors))
    right = rank.tensors(filled=True)
    for name, tensor in tensors.items():
        assert torch.equal(tensor.to_local(), right[name].to_local()), (name, tensor)
    expected, found = torch.load(folder / "wholes.pt"), rank.wholes()
    assert found.keys() == expected.keys(), (found.keys(), expected.keys())
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value.reshape(found[name].shape)), name


def partial_sums(folder: Path) -> None:
    """Saves what is the sum over the ranks, which no rank has: it is refused by name."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    mine = DTensor.from_local(torch.full((2,), float(dist.get_rank())), mesh, [Partial()])
    with (
        residency.Checkpointer(folder / "sums", timeout_seconds=WAIT) as checkpointer,
        pytest.raises(residency.RefusedError, match="total is a DTensor"),
    ):
        checkpointer.save(1, {"total": mine}).wait()


def main(phase: str, index: int, folder: Path, seed: int) -> None:
    torch.set_num_threads(1)
    drawn = Drawn(seed)
    size = drawn.ranks[phase]
    store = dist.FileStore(str(folder / f"store-{phase}"), size)
    dist.init_process_group("gloo", store=store, rank=index, world_size=size)
    rank = Rank(phase, drawn)
    if phase == "save":
        save(rank, folder)
        partial_sums(folder)
    else:
        restore(rank, folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
