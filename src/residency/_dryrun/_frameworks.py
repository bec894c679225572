"""Changes that a dry run makes to a script to see what they would give (``--fit``), and models that
are made from their configuration alone.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

import residency
from residency._dryrun._settings import RunSettings
from residency._memory import ImportWatch
from residency._optim import record_of


def change(settings: RunSettings) -> None:
    """Makes the changes that the settings ask for, also in modules that are imported later."""
    watched: dict[str, Any] = {}
    if settings.random_weights:
        watched["transformers.modeling_utils"] = _make_weights
    if settings.batch_divisor > 1:
        watched["transformers.training_args"] = functools.partial(
            _divide_batches, settings.batch_divisor
        )
    ImportWatch(watched).start()
    if settings.offload is not None:
        _offload(settings.offload)
    if settings.checkpointing:
        _recompute()


def _offload(resident: int) -> None:
    def before_step(optimizer: Optimizer, args: object, options: object) -> None:
        if record_of(optimizer) is None:
            residency.offload_optimizer(optimizer, resident=resident)

    register_optimizer_step_pre_hook(before_step)


def _recompute() -> None:
    seen: set[int] = set()

    def before_forward(module: torch.nn.Module, arguments: object) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        model: Any = module
        if getattr(model, "supports_gradient_checkpointing", False):
            if not model.is_gradient_checkpointing:
                model.gradient_checkpointing_enable()
            if hasattr(model, "enable_input_require_grads"):
                model.enable_input_require_grads()

    register_module_forward_pre_hook(before_forward)


def _divide_batches(divisor: int, module: ModuleType) -> None:
    arguments: Any = vars(module)["TrainingArguments"]
    check = arguments.__post_init__

    @functools.wraps(check)
    def checked(self: Any) -> None:
        smaller = max(1, self.per_device_train_batch_size // divisor)
        self.gradient_accumulation_steps *= self.per_device_train_batch_size // smaller
        self.per_device_train_batch_size = smaller
        check(self)

    arguments.__post_init__ = checked


def _make_weights(module: ModuleType) -> None:
    models: Any = vars(module)["PreTrainedModel"]
    load = models.from_pretrained.__func__

    @functools.wraps(load)
    def from_pretrained(
        cls: Any, name: Any, *args: object, config: Any = None, **options: object
    ) -> Any:
        if config is None:
            if name is None or not os.path.isdir(name):
                raise FileNotFoundError(
                    f"--random-weights needs a folder with the model's config.json; {name!r} is "
                    "none here. Make one, and give the script its path for the model's name."
                )
            config = cls.config_class.from_pretrained(name)
        dtype = options.get("dtype", options.get("torch_dtype"))
        if dtype in (None, "auto"):
            dtype = getattr(config, "dtype", None)
        if isinstance(dtype, str):
            dtype = getattr(torch, dtype)
        model = cls._from_config(config, **({} if dtype is None else {"dtype": dtype}))
        place = options.get("device_map")
        if isinstance(place, dict):
            place = next(iter(place.values()), None)
        if place is not None:
            model = model.to("cuda" if place in ("auto", "balanced", "sequential") else place)
        return model.eval()

    made: Any = from_pretrained
    models.from_pretrained = classmethod(made)
