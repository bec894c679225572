"""What the cases of park_worker.py share: modules, and training with parkings or without."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1] / "sim"))
from worker_cases import Cases

from residency import park, unpark

NUM_RANKS, PHASE, FOLDER = int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
cases = {name: Cases() for name in ("two", "uses")}
two, uses = cases.values()


def block(norm: type[nn.Module] = nn.BatchNorm1d) -> nn.Sequential:
    """Weights of 40, 7 and 1 rows: on two ranks, even, uneven and empty shards."""
    torch.manual_seed(0)
    modules = (nn.Linear(32, 40), norm(40), nn.Linear(40, 7), nn.Linear(7, 1))
    return nn.Sequential(*modules).to("sim")


def sharded(norm: type[nn.Module] = nn.BatchNorm1d, **settings: Any) -> nn.Sequential:
    model = block(norm)
    mesh = init_device_mesh("sim", (NUM_RANKS,))
    for module in (*model, model):
        fully_shard(module, mesh=mesh, **settings)
    return model


def batch(seed: int, rows: int = 6) -> Tensor:
    torch.manual_seed(100 * seed + (dist.get_rank() if dist.is_initialized() else 0))
    return torch.randn(rows, 32).to("sim")


def local(tensor: Any) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [v for s in optimizer.state.values() for v in s.values()]
    parameters = [p.detach() for group in optimizer.param_groups for p in group["params"]]
    return [local(t).cpu() for t in (*parameters, *model.buffers(), *states)]


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def away(model: nn.Module, optimizer: torch.optim.Optimizer, **settings: Any) -> None:
    before = torch.accelerator.memory_allocated()
    freed = park(model, **settings) + park(optimizer)
    assert freed > 0
    assert torch.accelerator.memory_allocated() <= before - freed
    values = [*model.parameters(), *model.buffers()]
    assert all(local(t).is_cpu for t in values) or "need" in settings
    assert unpark(model) + unpark(optimizer) == freed
    assert not any(local(t).is_cpu for t in values)


def train(make: Callable[[], nn.Module], parked: bool, **settings: Any) -> list[Tensor]:
    """Takes steps on two accumulated gradients each, the first of them without a reduction."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def between() -> None:
        if parked:
            away(model, optimizer, **settings)

    between()
    for step in range(4):
        with accumulating(model):
            model(batch(2 * step)).square().sum().backward()
        between()
        model(batch(2 * step + 1)).square().sum().backward()
        between()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.eval()(batch(50))  # leaves what the root has gathered
            model.train()
        between()
    return bits(model, optimizer)


@contextlib.contextmanager
def accumulating(model: nn.Module) -> Iterator[None]:
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)
    elif isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    else:
        yield


def both_train_alike(make: Callable[[], nn.Module], **settings: Any) -> None:
    assert equal(train(make, True, **settings), train(make, False))
