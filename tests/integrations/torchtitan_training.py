"""A training run in the hands of torchtitan's own container and checkpoint manager, or of ours."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful

WIDTH, NUM_EXPERTS = 64, 4
DOOR = "residency.integrations.torchtitan"
STATE_BYTES_PER_VALUE = 8  # two moments in float32


def titan(name: str) -> Any:
    """Returns a name of torchtitan's, wherever it has it."""
    for module in ("config", "components.optimizer", "components.checkpointer"):
        found = getattr(importlib.import_module(f"torchtitan.{module}"), name, None)
        if found is not None:
            return found
    raise LookupError(name)


def ours(name: str) -> Any:
    return getattr(importlib.import_module(DOOR), name)


class Moe(nn.Module):
    """Counts the tokens of its experts in forward, as torchtitan's does; a hook reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.load_balance_coeff = 1e-2
        self.register_buffer("tokens_per_expert_E", torch.zeros(NUM_EXPERTS))
        self.register_buffer("expert_bias_E", torch.zeros(NUM_EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        chosen = (scores + self.expert_bias_E).argmax(-1)
        counts = nn.functional.one_hot(chosen, NUM_EXPERTS).sum(0)
        self.tokens_per_expert_E.add_(counts)
        mixed: Tensor = self.mix(x) * scores.gather(-1, chosen[:, None])
        return x + mixed


class Block(nn.Module):
    moe_enabled = True

    def __init__(self) -> None:
        super().__init__()
        self.moe = Moe()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.moe(x)
        return found


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({str(index): Block() for index in range(2)})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers.values():
            x = block(x)
        return x


class Schedules(Stateful):
    """Saves one number, as torchtitan's container of schedulers does."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self.each = [torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.9**n) for o in optimizers]

    def step(self) -> None:
        for schedule in self.each:
            schedule.step()

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.each[0].last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for schedule in self.each:
            schedule.last_epoch = state_dict["last_epoch"]
            schedule._step_count = schedule.last_epoch + 1


def optimizer_config(implementation: str = "for-loop") -> Any:
    """Returns a config of two optimizers, one of them with two groups."""
    group = titan("ParamGroupConfig")
    return titan("OptimizersContainer").Config(
        param_groups=[
            group(pattern=r"bias$", optimizer_name="Adam", optimizer_kwargs={"lr": 3e-3}),
            group(pattern=r"gate", optimizer_name="AdamW", optimizer_kwargs={"lr": 2e-3}),
            group(
                pattern=r".*",
                optimizer_name="AdamW",
                optimizer_kwargs={"lr": 1e-2, "weight_decay": 0.1},
            ),
        ],
        implementation=implementation,
    )


class Training(Stateful):
    """Is torchtitan's train loop, with what it saves.

    Args:
        device: Where the model is.
        folder: Of the checkpoints.
        offloaded: Whether the optimizers are ours, with these settings.
        managed: Whether the manager is ours.
        implementation: How torchtitan's optimizers step.
        dtype: That of the parameters.
        saving: Fields of the manager's config.
    """

    def __init__(
        self,
        device: torch.device,
        folder: Path,
        *,
        offloaded: bool | dict[str, Any] = False,
        managed: bool = False,
        implementation: str = "for-loop",
        dtype: torch.dtype = torch.float32,
        **saving: Any,
    ) -> None:
        self.device, self.dtype, self.step = device, dtype, 0
        self.model = Model().to(device, dtype)
        built = optimizer_config(implementation)
        if offloaded is not False:
            settings = {"bucket": "16KiB"} if offloaded is True else offloaded
            built = ours("offload_optimizers")(built, **settings)
        self.optimizers: Any = built.build(model_parts=[self.model])
        dims = SimpleNamespace(ep_enabled=False, tp=1, get_optional_mesh=lambda name: None)
        titan("register_moe_load_balancing_hook")(self.optimizers, [self.model], dims)
        self.schedules = Schedules(self.optimizers)
        fields = {"interval": 1, "keep_latest_k": 0, "last_save_model_only": False, **saving}
        kept = titan("CheckpointManager").Config(enable=True, **fields)
        if managed:
            kept = ours("save_with_residency")(kept)
        self.manager: Any = kept.build(
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedules,
            states={"train_state": self},
            sd_adapter=None,
            base_folder=str(folder),
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]

    def train(self, num_steps: int, *, saves: Iterable[int] = ()) -> None:
        """Takes steps with the batch of their number, each with a save after it that is asked."""
        for _ in range(num_steps):
            self.step += 1
            self.optimizers.zero_grad(set_to_none=True)
            generator = torch.Generator().manual_seed(self.step)
            x = torch.randn(16, WIDTH, generator=generator).to(self.device, self.dtype)
            self.model(x).square().mean().backward()
            self.manager.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedules.step()
            if self.step in saves:
                self.manager.save(self.step)

    def picture(self) -> dict[str, Any]:
        """Returns everything that a step reads or writes, copied to the host."""
        found = dict(self.model.state_dict())
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for name, parameter in zip(group["param_names"], group["params"], strict=True):
                    found[f"{name}.lr"] = torch.tensor(group["lr"])
                    state = dict(optimizer.state.get(parameter, {}))
                    found |= {f"{name}.{key}": value for key, value in state.items()}
        return {name: value.detach().cpu().clone() for name, value in found.items()}


def widened(kernel: Callable[..., None]) -> Callable[..., None]:
    """Returns a fused kernel that takes moments in bfloat16 beside parameters in float32.

    Of torch's kernels only that of CUDA does. Each element by itself, as there.
    """

    def step(params: Any, grads: Any, first: Any, second: Any, most: Any, steps: Any, **how: Any):  # type: ignore[no-untyped-def]
        wide = [[each.float() for each in moments] for moments in (first, second)]
        kernel(params, grads, *wide, most, steps, **how)
        for narrow, each in zip((*first, *second), (*wide[0], *wide[1]), strict=True):
            narrow.copy_(each)

    return step
