"""Stands in for prime-rl, which is on no package index: what its trainers call, as published.

Written from the interface of ``src/prime_rl/trainer/optim`` and ``trainer/ckpt.py`` of
PrimeIntellect-ai/prime-rl (559b4477, 2026-08-21): the arguments and results of ``setup_optimizer``,
and the calls of ``AppState``. `make test-projects` runs the real one.
"""

from __future__ import annotations

import abc
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler


class OffloadOptimizer(abc.ABC):
    @property
    @abc.abstractmethod
    def base_optimizer(self) -> Optimizer: ...


class CPUOffloadOptimizer(OffloadOptimizer):
    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def base_optimizer(self) -> Optimizer:
        return self.optimizer


class GradientOffloadManager:
    pass


@dataclass
class OptimizerConfig:
    type: str = "adamw"
    lr: float = 1e-2


def setup_optimizer(
    config: OptimizerConfig,
    named_params: list[tuple[str, nn.Parameter]],
    parallel_dims: object,
    cpu_offload: bool = False,
    full_offload_config: object | None = None,
    model: nn.Module | None = None,
) -> tuple[Any, GradientOffloadManager | None]:
    trainable = [p for _, p in named_params if p.requires_grad]
    optimizer: Optimizer
    if config.type == "sgd":
        optimizer = SGD(trainable, lr=config.lr, momentum=0.9)
    else:
        optimizer = AdamW(trainable, lr=config.lr)
    if full_offload_config is not None:
        return CPUOffloadOptimizer(optimizer), GradientOffloadManager()
    return (CPUOffloadOptimizer(optimizer) if cpu_offload else optimizer), None


def setup_optimizer_before_3234(
    config: OptimizerConfig,
    named_params: list[tuple[str, nn.Parameter]],
    parallel_dims: object,
    cpu_offload: bool = False,
) -> Any:
    return setup_optimizer(config, named_params, parallel_dims, cpu_offload)[0]


@dataclass
class Progress:
    step: int = 1


class AppState(Stateful):
    """Is, of prime-rl's, the branch for a plain ``torch.optim.Optimizer``."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, progress: Progress
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.scheduler, self.progress = scheduler, progress

    def state_dict(self) -> dict[str, Any]:
        model, optimizers = get_state_dict(self.model, [self.optimizer])
        return {
            "model": model,
            "optimizers": optimizers,
            "scheduler": self.scheduler.state_dict(),
            "progress": asdict(self.progress),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            [self.optimizer],
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizers"],
        )
        self.scheduler.load_state_dict(state_dict["scheduler"])
        vars(self.progress).update(state_dict["progress"])


def save(state: AppState, folder: Path) -> None:
    dcp.save({"app": state}, checkpoint_id=folder)


def load(state: AppState, folder: Path) -> None:
    dcp.load({"app": state}, checkpoint_id=folder)
