"""Stands in for Axolotl where it is not installed: of its published interface, what a plugin meets.

Written from axolotl-ai-cloud/axolotl (067b021c, 2026-07-24; 0.19.0 is alike): how plugins are
registered, how their keys are merged into the configuration, whom the builder asks for callbacks
and for a trainer's class, and what ``AxolotlTrainer`` does when it saves. Axolotl pins other
versions of its frameworks, so it has an environment of its own; there the same cases run with it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
import types
from collections import OrderedDict
from pathlib import Path
from typing import Any

import transformers
from pydantic import BaseModel


class DictDefault(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return self.get(name)


class BasePlugin:
    def register(self, cfg: Any) -> None: ...

    def get_input_args(self) -> str | None: ...

    def get_trainer_cls(self, cfg: Any) -> type | None: ...

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None: ...

    def create_optimizer(self, cfg: Any, trainer: Any) -> Any: ...

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        return []

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        return []


class PluginManager:
    _instance: PluginManager | None = None

    def __init__(self) -> None:
        self.plugins: OrderedDict[str, BasePlugin] = OrderedDict()

    @staticmethod
    def get_instance() -> PluginManager:
        if PluginManager._instance is None:
            PluginManager._instance = PluginManager()
        return PluginManager._instance

    def register(self, plugin_name: str) -> None:
        module, _, name = plugin_name.rpartition(".")
        try:
            self.plugins[plugin_name] = getattr(importlib.import_module(module), name)()
        except ImportError:
            traceback.print_exc()  # and goes on without the plugin

    def get_trainer_cls(self, cfg: Any) -> type | None:
        found = (plugin.get_trainer_cls(cfg) for plugin in self.plugins.values())
        return next((each for each in found if each is not None), None)

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        for plugin in self.plugins.values():
            plugin.post_trainer_create(cfg, trainer)


class AxolotlInputConfig(BaseModel):
    base_model: str
    output_dir: str
    optimizer: str = "adamw_torch_fused"
    learning_rate: float
    max_steps: int
    save_steps: int
    micro_batch_size: int
    lr_scheduler: str = "cosine"
    model_config_type: str | None = None
    plugins: list[str] | None = None
    reward_model: bool | None = None
    trainer_cls: str | None = None
    rl: str | None = None


def prepare_plugins(cfg: Any) -> None:
    for name in cfg.get("plugins") or ():
        PluginManager.get_instance().register(name)


def validate_config(cfg: Any) -> DictDefault:
    bases: list[type] = [AxolotlInputConfig]
    for plugin in PluginManager.get_instance().plugins.values() if cfg.get("plugins") else ():
        if (path := plugin.get_input_args()) is not None:
            module, _, name = path.rpartition(".")
            bases.append(getattr(importlib.import_module(module), name))
    merged = types.new_class("AxolotlInputConfig", tuple(bases))
    return DictDefault(merged(**cfg).model_dump(exclude_none=True))


class AxolotlTrainer(transformers.Trainer):
    axolotl_cfg: Any = None

    def __init__(self, *args: Any, bench_data_collator: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any, **kwargs: Any) -> None:
        folder = Path(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokens_state.json").write_text(json.dumps({"total": self.state.global_step}))
        super()._save_checkpoint(model, trial, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = self.args.output_dir if output_dir is None else output_dir
        os.makedirs(folder, exist_ok=True)
        self.model.save_pretrained(folder, state_dict=state_dict)
        self.processing_class.save_pretrained(folder)


class AxolotlRewardTrainer(transformers.Trainer):
    pass


class HFCausalTrainerBuilder:
    train_dataset: Any = None
    eval_dataset: Any = None

    def __init__(self, cfg: Any, model: Any, tokenizer: Any) -> None:
        self.cfg, self.model, self.tokenizer = cfg, model, tokenizer

    def _get_trainer_cls(self) -> type:
        found = PluginManager.get_instance().get_trainer_cls(self.cfg)
        own = AxolotlRewardTrainer if self.cfg.reward_model else AxolotlTrainer
        return found or own

    def get_callbacks(self) -> list[Any]:
        plugins = PluginManager.get_instance().plugins.values()
        return [c for p in plugins for c in p.add_callbacks_pre_trainer(self.cfg, self.model)]

    def build(self, total_num_steps: int) -> Any:
        cfg = self.cfg
        trainer = self._get_trainer_cls()(
            model=self.model,
            train_dataset=self.train_dataset,
            eval_dataset=self.eval_dataset,
            args=transformers.TrainingArguments(
                cfg.output_dir,
                max_steps=cfg.max_steps,
                save_steps=cfg.save_steps,
                learning_rate=cfg.learning_rate,
                optim=cfg.optimizer,
                lr_scheduler_type=cfg.lr_scheduler,
                per_device_train_batch_size=cfg.micro_batch_size,
                report_to=[],
                disable_tqdm=True,
            ),
            callbacks=self.get_callbacks(),
            processing_class=self.tokenizer,
        )
        trainer.axolotl_cfg = cfg
        for plugin in PluginManager.get_instance().plugins.values():
            for callback in plugin.add_callbacks_post_trainer(cfg, trainer):
                trainer.add_callback(callback)
        return trainer


_MODULES = ("integrations.base", "utils.config", "utils.dict", "core.trainers", "core.builders")


def install() -> None:
    """Makes the modules of Axolotl that a plugin and these tests import this one."""
    for name in _MODULES:
        above = ""
        for part in f"axolotl.{name}".split(".")[:-1]:
            above = f"{above}.{part}".lstrip(".")
            sys.modules.setdefault(above, types.ModuleType(above))
        sys.modules[f"axolotl.{name}"] = sys.modules[__name__]
