"""Models that are made from their configuration alone."""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any

import torch

from residency._dryrun._settings import RunSettings
from residency._memory import ImportWatch


def change(settings: RunSettings) -> None:
    """Makes the changes that the settings ask for, also in modules that are imported later."""
    if settings.random_weights:
        ImportWatch({"transformers.modeling_utils": _make_weights}).start()


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
