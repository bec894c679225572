"""Stands in for LLaMA-Factory's v1 where it is not installed: what builds and saves an optimizer.

Written from hiyouga/LLaMA-Factory (ff6d4d12, 2026-08-18): the registry of plugins, the arguments
that name an optimizer, and what ``BaseTrainer`` does with it on one rank. LLaMA-Factory pins older
frameworks; where it is installed, the same cases run with it.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch


class PluginConfig(dict[str, Any]):
    @property
    def name(self) -> str:
        return str(self["name"])


@dataclass
class TrainingArguments:
    output_dir: str
    learning_rate: float
    max_steps: int
    save_steps: int
    optim_config: Any = None
    resume_from_checkpoint: str | None = None

    def __post_init__(self) -> None:
        if self.optim_config is not None:
            self.optim_config = PluginConfig({**self.optim_config, "lr": self.learning_rate})


class OptimizerPlugin:
    _registry: ClassVar[dict[str, Any]] = {}

    def __init__(self, name: str) -> None:
        self.name = name

    def register(self) -> Callable[[Any], Any]:
        def decorator(made: Any) -> Any:
            self._registry[self.name] = made
            return made

        return decorator

    def __call__(self, *given: Any) -> Any:
        return self._registry[self.name](*given)


class BaseTrainer:
    train_batch_generator: Any

    def __init__(self, args: Any, model: Any, renderer: Any, train_dataset: Any) -> None:
        self.args, self.model, self.train_dataset = args, model, train_dataset
        self.device, self.global_step = next(model.parameters()).device, 0
        self._create_batch_generator()
        if args.optim_config is None:
            trainable = [p for p in model.parameters() if p.requires_grad]
            self.optimizer: Any = torch.optim.AdamW(trainable, lr=args.learning_rate)
        else:
            self.optimizer = OptimizerPlugin(args.optim_config.name)(model, args.optim_config)
        if args.resume_from_checkpoint:
            folder = Path(args.resume_from_checkpoint)
            read = {"map_location": self.device, "weights_only": True}
            model.load_state_dict(torch.load(folder / "model.pt", **read))
            self.optimizer.load_state_dict(torch.load(folder / "optimizer.pt", **read))
            self.global_step = int(folder.name.split("-")[1])
            self.train_batch_generator.load_state_dict(torch.load(folder / "batches.pt"))

    def _create_batch_generator(self) -> None: ...

    def fit(self) -> None:
        for micro_batches in self.train_batch_generator:
            self.global_step += 1
            for batch in micro_batches:
                self.compute_loss(batch).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.global_step % self.args.save_steps == 0:
                folder = Path(self.args.output_dir, f"checkpoint-{self.global_step}")
                folder.mkdir(parents=True)
                torch.save(self.model.state_dict(), folder / "model.pt")
                torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")
                torch.save(self.train_batch_generator.state_dict(), folder / "batches.pt")
            if self.global_step >= self.args.max_steps:
                return

    def compute_loss(self, batch: Any) -> Any: ...


_MODULES = (
    "plugins.trainer_plugins.optimizers.optimizer",
    "core.base_trainer",
    "config.training_args",
)


def install() -> None:
    """Makes the modules of v1 that the plugin and its tests import this one."""
    for name in _MODULES:
        above = ""
        for part in f"llamafactory.v1.{name}".split(".")[:-1]:
            above = f"{above}.{part}".lstrip(".")
            sys.modules.setdefault(above, types.ModuleType(above))
        sys.modules[f"llamafactory.v1.{name}"] = sys.modules[__name__]
