"""A training run that the tests of the parts for DCP save, resume and compare, on any device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

import residency
from residency.integrations.dcp import TrainState

BUCKET = 40960  # the spare is two of them, all of the state: no step waits for one save
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {}),
    "Adam": (torch.optim.Adam, {}),
    "foreach": (torch.optim.AdamW, {"foreach": True}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    "NAdam": (torch.optim.NAdam, {}),
    "ASGD": (torch.optim.ASGD, {}),
}


def layers(width: int = 64) -> nn.Sequential:
    """Layers whose rows fill vectors, so that a shard's kernels round as the whole's do."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Linear(width, width, bias=False))


class Run:
    """Is a model with an optimizer, offloaded or not, a scheduler and what saves them."""

    def __init__(
        self,
        device: torch.device | str,
        name: str = "AdamW",
        *,
        offload: bool,
        make: Callable[[], nn.Sequential] = layers,
        shard: Callable[[nn.Sequential], nn.Module] = lambda model: model,
        num_in_first: int = 2,
        **settings: Any,
    ) -> None:
        self.model = shard(make().to(device))
        kind, arguments = OPTIMIZERS[name]
        parameters = list(self.model.parameters())
        groups = [{"params": parameters[:num_in_first], "count": 0}]
        if parameters[num_in_first:]:
            groups.append({"params": parameters[num_in_first:], "lr": 3e-3, "count": 0})
        self.optimizer = kind(groups, lr=1e-2, **arguments)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 0.9**n)
        if offload:
            residency.offload_optimizer(self.optimizer, **{"bucket": BUCKET, **settings})
        self.state = TrainState(self.model, self.optimizer, scheduler=self.scheduler, step=0)

    @property
    def parameters(self) -> list[Any]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def train(self, steps: Iterable[int], *, but: Iterable[int] = ()) -> None:
        """Steps with gradients that depend on the step alone; some parameters may get none."""
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            for index, parameter in enumerate(self.parameters):
                whole = torch.randn(parameter.shape, generator=generator)
                if index not in but:
                    parameter.grad = _like(whole, parameter)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.optimizer.param_groups[-1]["count"] += 1
            self.state.counters["step"] = step + 1


def _like(whole: Tensor, parameter: Any) -> Tensor:
    on_device = whole.to(parameter.device, parameter.dtype)
    if isinstance(parameter, nn.Parameter) and hasattr(parameter, "placements"):
        from torch.distributed.tensor import distribute_tensor

        mesh, placements = parameter.device_mesh, parameter.placements
        return distribute_tensor(on_device, mesh, placements, src_data_rank=None)
    return on_device


def _plain(value: Any) -> Any:
    """Returns a copy on the host; of a shard its local tensor."""
    if isinstance(value, Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        return local.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return copy.deepcopy(value)


def picture(run: Run) -> dict[str, Any]:
    """Returns everything that a step reads or writes, as it is now."""
    states = [_plain(dict(run.optimizer.state.get(p, {}))) for p in run.parameters]
    return {
        "parameters": [_plain(p) for p in run.parameters],
        "buffers": [_plain(b) for b in run.model.buffers()],
        "states": [dict(sorted(s.items())) for s in states],
        "groups": [
            {k: v for k, v in sorted(group.items()) if k != "params"}
            for group in copy.deepcopy(
                [{k: v for k, v in g.items() if k != "params"} for g in run.optimizer.param_groups]
            )
        ],
        "scheduler": _plain(run.scheduler.state_dict()),
        "counters": _plain(run.state.counters),
    }


class AppState(Stateful):
    """Is the recipe of torch's own tutorial, as prime-rl and others have it."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.run.model, self.run.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.run.model,
            self.run.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )


class BrokenWriter(dcp.FileSystemWriter):
    def write_data(self, plan: Any, planner: Any) -> Any:
        raise OSError("no space left, let us say")


def states_of(run: Run) -> list[Tensor]:
    """Returns all tensors of its optimizer's states, where they are: none is moved by the look."""
    state = vars(run.optimizer)["state"]
    return [v for p in run.parameters for v in state[p].values() if isinstance(v, Tensor)]
