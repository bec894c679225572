"""Stands in for XTuner v1, which is on no package index: its config classes as they are published.

Written from the interface of ``xtuner/v1/config/optim.py`` and ``xtuner/v1/engine/train_engine.py``
of InternLM/xtuner (b934f462, 2026-08-21): fields, defaults, which parameters an optimizer gets, and
the calls of ``TrainEngine`` that save, load and move an optimizer. There is no ``SwapAdamW`` here:
what XTuner's own code does with it is what `make test-projects` shows.
"""

from __future__ import annotations

import abc
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from pydantic import BaseModel, ConfigDict
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)


class OptimConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")
    lr: float = 1e-5
    max_grad_norm: float = 1.0
    skip_grad_norm_threshold: float | None = None

    @abc.abstractmethod
    def build(self, params: Any) -> Any: ...


class AdamWConfig(OptimConfig):
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    foreach: bool | None = None
    swap_optimizer: bool | None = False

    def build(self, model: Any) -> torch.optim.Optimizer:
        names = [name for name, _ in model.trainable_parameters()]
        assert names == [name for name, p in model.named_parameters() if p.requires_grad]
        assert not self.swap_optimizer, "SwapAdamW would be built"
        return torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad],
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            foreach=self.foreach,
        )


class TrainerConfig(BaseModel):
    optim_cfg: OptimConfig


class Model(nn.Sequential):
    def trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.named_parameters() if p.requires_grad]


class TrainEngine:
    """Is of XTuner's engine what touches the optimizer."""

    def __init__(self, model: Model, optim_cfg: OptimConfig) -> None:
        self.model, self.optim_cfg = model, optim_cfg
        self.optimizer = optim_cfg.build(model)

    def _state_dict(self) -> dict[str, Any]:
        options = StateDictOptions(cpu_offload=True)
        return {
            "model": get_model_state_dict(self.model, options=options),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=options),
        }

    def save_dcp(self, folder: Path) -> None:
        dcp.save(self._state_dict(), checkpoint_id=folder)

    def load_dcp(self, folder: Path) -> None:
        state = self._state_dict()
        options = StateDictOptions(cpu_offload=True, strict=True)
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(self.model, state["model"], options=options)
        set_optimizer_state_dict(
            self.model, self.optimizer, optim_state_dict=state["optimizer"], options=options
        )

    def put_optimizer_to_device(self, device: torch.device | str) -> bool:
        if getattr(self.optim_cfg, "swap_optimizer", False):
            return False
        for state in self.optimizer.state.values():
            for key, value in state.items():
                state[key] = value.to(device) if isinstance(value, torch.Tensor) else value
        return True


def install() -> types.ModuleType:
    """Makes ``xtuner.v1.config.optim`` importable, as this module."""
    for name in ("xtuner", "xtuner.v1", "xtuner.v1.config"):
        sys.modules[name] = types.ModuleType(name)
    found = sys.modules[__name__]
    sys.modules["xtuner.v1.config.optim"] = found
    return found


def uninstall() -> None:
    """Takes it away again, and the class that was made over it."""
    from residency.integrations import xtuner

    for name in [n for n in sys.modules if n.partition(".")[0] == "xtuner"]:
        del sys.modules[name]
    xtuner._config_class.cache_clear()
