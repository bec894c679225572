"""Sharded models and runs that the cases of several ranks train, and how they compare them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "sim"))
from worker_cases import Cases

import residency
from residency.testing import tested_device_type

NUM_RANKS, PHASE = int(sys.argv[2]), sys.argv[3]
FOLDER = Path(sys.argv[4])
DEVICE = tested_device_type()
BACKEND = "nccl" if DEVICE == "cuda" else "simccl"
BUCKET = 2048  # (33, 40) is cut, on two ranks too
cases = {name: Cases() for name in ("first", "pair", "second", "last", "four")}
first, pair, second, last, four = cases.values()
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {}),
    "fused": (torch.optim.AdamW, {"fused": True}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "NAdam": (torch.optim.NAdam, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Muon": (torch.optim.Muon, {}),
}
ELEMENT_WISE = [name for name in OPTIMIZERS if name != "Muon"]


# ------------------------------------------------------------------------------- what cases share


def layers() -> nn.Sequential:
    """Weights of 40, 7 and 1 rows: on two ranks, even, uneven and empty shards."""
    torch.manual_seed(0)
    modules = (nn.Linear(33, 40), nn.Linear(40, 7), nn.Linear(7, 1, bias=False))
    return nn.Sequential(*modules).to(DEVICE)


def whole_vectors() -> nn.Sequential:
    """As above, but a rank's elements are multiples of 32: CPU kernels may round the elements that
    fill no vector otherwise than the rest, and those would be others on another number of ranks.
    """
    torch.manual_seed(0)
    modules = (nn.Linear(32, 64), nn.Linear(64, 3, bias=False), nn.Linear(32, 1, bias=False))
    return nn.Sequential(*modules).to(DEVICE)


def sharded(
    shape: tuple[int, ...] | None = None,
    make_layers: Callable[[], nn.Sequential] = layers,
    **settings: Any,
) -> nn.Sequential:
    model = make_layers()
    shape = shape or (NUM_RANKS,)
    mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=("replica", "shard")[-len(shape) :])
    for module in (*model, model):
        fully_shard(module, mesh=mesh, **settings)
    return model


class Run:
    """Is a model with an optimizer, offloaded or not."""

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        name: str = "AdamW",
        *,
        offload: bool,
        chosen: Callable[[nn.Module], Iterable[Tensor]] = nn.Module.parameters,
        **settings: Any,
    ) -> None:
        self.model = make_model()
        kind, arguments = OPTIMIZERS[name]
        parameters = list(chosen(self.model))
        groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 3e-3}]
        self.optimizer = kind(groups, lr=1e-2, **arguments)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 0.9**n)
        if offload:
            residency.offload_optimizer(self.optimizer, **{"bucket": BUCKET, **settings})

    @property
    def parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def train(self, steps: Iterable[int], *, clip: bool = False, missing: bool = False) -> None:
        """Steps on another batch on each rank."""
        for step in steps:
            torch.manual_seed(100 * step + dist.get_rank())
            self.model(torch.randn(4, 33).to(DEVICE)).float().square().sum().backward()
            if clip:
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            for index, parameter in enumerate(self.parameters if missing else ()):
                if (step + index) % 3 == 0:
                    parameter.grad = None
            self._step()

    def feed(self, steps: Iterable[int]) -> None:
        """Steps on the same gradients however many ranks there are."""
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            for parameter in self.parameters:
                whole = torch.randn(parameter.shape, generator=generator).to(DEVICE)
                mesh, placements = parameter.device_mesh, parameter.placements
                parameter.grad = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            self._step()

    def _step(self) -> None:
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        # Reuses whatever the step freed: a copy that still reads it would carry this value home.
        torch.full((50_000,), 7.0, device=DEVICE)


def assert_same_tensor(ours: Any, theirs: Any, what: str) -> None:
    assert type(ours) is type(theirs), (what, type(ours), type(theirs))
    assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
    if isinstance(ours, DTensor):
        assert ours.device_mesh == theirs.device_mesh, what
        assert ours.placements == theirs.placements, (what, ours.placements, theirs.placements)
        ours, theirs = ours.to_local(), theirs.to_local()
    assert torch.equal(ours.detach().cpu(), theirs.detach().cpu()), f"{what} differs"


def assert_same(ours: Run, theirs: Run) -> None:
    """Compares parameters, states, groups and schedulers, bit for bit."""
    assert ours.parameters
    for index, (mine, other) in enumerate(zip(ours.parameters, theirs.parameters, strict=True)):
        assert_same_tensor(mine, other, f"parameter {index}")
        assert (mine in ours.optimizer.state) == (other in theirs.optimizer.state), index
        values = dict(ours.optimizer.state.get(mine, {}))
        others = dict(theirs.optimizer.state.get(other, {}))
        assert list(values) == list(others), (index, list(values), list(others))
        for key, value in values.items():
            if isinstance(value, Tensor):
                assert_same_tensor(value, others[key], f"{key} of parameter {index}")
            else:
                assert value == others[key], (index, key)
    groups, others = (
        [{k: v for k, v in g.items() if k != "params"} for g in run.optimizer.param_groups]
        for run in (ours, theirs)
    )
    assert repr(groups) == repr(others)
    assert repr(ours.scheduler.state_dict()) == repr(theirs.scheduler.state_dict())


def both_train_alike(
    make_model: Callable[[], nn.Module],
    name: str = "AdamW",
    *,
    chosen: Callable[[nn.Module], Iterable[Tensor]] = nn.Module.parameters,
    train: dict[str, Any] | None = None,
    **settings: Any,
) -> Run:
    """Trains offloaded and plain, takes the offload back, and trains on; returns the former."""
    plain = Run(make_model, name, offload=False, chosen=chosen)
    ours = Run(make_model, name, offload=True, chosen=chosen, **settings)
    for run in (ours, plain):
        run.train(range(4), **(train or {}))
    assert_same(ours, plain)
    residency.onload_optimizer(ours.optimizer)
    assert_same(ours, plain)
    for run in (ours, plain):
        run.train(range(4, 5), **(train or {}))
    assert_same(ours, plain)
    return ours


def matrices(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.dim() == 2 and p.shape[0] > 1]


def block() -> nn.Sequential:
    """Its norm sees a part of the sequence on each rank, so its gradients are partial sums."""
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(33), nn.Linear(33, 48), nn.ReLU(), nn.Linear(48, 7)).to(
        DEVICE
    )


def tensor_parallel(mesh: Any = None) -> nn.Sequential:
    return parallelize_module(
        block(),
        mesh or init_device_mesh(DEVICE, (NUM_RANKS,)),
        {
            "0": SequenceParallel(sequence_dim=0),
            "1": ColwiseParallel(input_layouts=Shard(0)),
            "3": RowwiseParallel(),
        },
    )


def two_dimensional() -> nn.Sequential:
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("data", "tensor"))
    model = tensor_parallel(mesh["tensor"])
    for module in (model[0], model[1], model[3], model):
        fully_shard(module, mesh=mesh["data"])
    return model
