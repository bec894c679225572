"""A plugin for Axolotl: ``plugins: [residency.integrations.axolotl.ResidencyPlugin]`` in its YAML.

Axolotl asks its plugins for callbacks and for the trainer's class, and merges their keys into its
own configuration; its hook ``create_optimizer`` has no caller. Invariant, which
``tests/integrations/test_axolotl.py`` tries to break: a key that begins with ``residency_`` either
has an effect or is an error, since Axolotl drops keys that it does not know.

Source: axolotl-ai-cloud/axolotl 067b021c (2026-07-24), ``integrations/base.py`` and ``config.py``,
``core/builders`` and ``core/trainers/base.py``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, Field, field_validator, model_validator

from residency._errors import InvalidArgumentError, RefusedError
from residency._optim import parse_bucket
from residency.integrations._common._framework import (
    hook_in,
    load_framework,
    missing_in,
    named_with_version,
)
from residency.integrations.transformers import ResidencyCallback, ResidencyTrainerMixin

__all__ = ["ResidencyArgs", "ResidencyPlugin"]

_INSTALL = "pip install 'axolotl>=0.19'"
_NEWER = f"install a newer one: {_INSTALL}"
_PREFIX = "residency_"
# What Axolotl calls of a plugin, and this one has: each has callers in the version above.
_HOOKS = ("add_callbacks_pre_trainer", "get_input_args", "get_trainer_cls", "post_trainer_create")
# With these Axolotl chooses, or makes, its trainer in a way that a plugin's class would bypass.
_OTHER_TRAINERS = ("rl", "reward_model", "process_reward_model", "trainer_cls")
_log = logging.getLogger("residency")


def _base_module() -> Any:
    """Returns Axolotl's module of plugins.

    Raises:
        ImportError: Axolotl is not installed.
        RefusedError: It lacks a hook. Not an ``ImportError``, which Axolotl prints and passes over.
    """
    module = load_framework("axolotl.integrations.base", install=_INSTALL)
    base = hook_in(module, "BasePlugin", distribution="axolotl", remedy=_NEWER)
    hook_in(module, "PluginManager", distribution="axolotl", remedy=_NEWER)
    for name in _HOOKS:
        if not callable(getattr(base, name, None)):
            raise missing_in("axolotl", f"BasePlugin.{name}", _NEWER)
    return module


_module = _base_module()
if TYPE_CHECKING:
    BasePlugin = object
else:
    BasePlugin = _module.BasePlugin


class ResidencyArgs(BaseModel):
    """The keys that the plugin adds to Axolotl's configuration; all are optional.

    Attributes:
        residency_offload: As ``offload`` of the ``ResidencyCallback`` of Transformers.
        residency_resident: As ``resident`` there.
        residency_bucket: As ``bucket`` there.
        residency_slots: As ``slots`` there.
        residency_pin: As ``pin`` there.
        residency_master_weights: As ``master_weights`` there.
        residency_outputs_on_host: As ``outputs_on_host`` there.
        residency_max_in_flight: As ``max_in_flight`` of the ``ResidencyTrainerMixin``.
    """

    residency_offload: bool = True
    residency_resident: int | str = 0
    residency_bucket: int | str | None = None
    residency_slots: int = Field(default=3, ge=1)
    residency_pin: bool = True
    residency_master_weights: bool = False
    residency_outputs_on_host: bool = True
    residency_max_in_flight: int = Field(default=1, ge=0)

    @model_validator(mode="before")
    @classmethod
    def refuse_what_nobody_reads(cls, data: object) -> object:
        """Refuses keys of this prefix that do not exist, and a plugin that is named twice.

        Raises:
            InvalidArgumentError: One is there.
        """
        if not isinstance(data, Mapping):
            return data
        known = sorted(ResidencyArgs.model_fields)
        unknown = sorted(key for key in data if str(key).startswith(_PREFIX) and key not in known)
        if unknown:
            raise InvalidArgumentError(
                f"the configuration has {', '.join(map(repr, unknown))}, which {_who()} would drop "
                f"without a word; expected one of {', '.join(known)}."
            )
        named = [str(each) for each in data.get("plugins") or ()]
        twice = sorted({name for name in named if named.count(name) > 1 and _is_ours(name)})
        if twice:
            raise _named_twice(twice)
        return data

    @field_validator("residency_resident", "residency_bucket")
    @classmethod
    def check_size(cls, size: int | str | None, info: Any) -> int | str | None:
        """Returns a size that parses, or None for a bucket that is not given.

        Raises:
            InvalidArgumentError: It does not.
        """
        parse_bucket(size, name=info.field_name)
        return size

    @classmethod
    def of(cls, cfg: Mapping[str, Any]) -> Self:
        """Returns the settings of a configuration, which may have been through Axolotl or not."""
        own = {key: value for key, value in cfg.items() if str(key).startswith(_PREFIX)}
        return cls(**{key: value for key, value in own.items() if value is not None})


class ResidencyPlugin(BasePlugin):
    """The plugin of Axolotl: its keys, a callback, and a mixin over Axolotl's trainer.

    Every trainer that Axolotl builds gets a `ResidencyCallback`. Axolotl's own ``AxolotlTrainer``,
    and a subclass of it from another plugin, gets the `ResidencyTrainerMixin` as well. Trainers for
    ``rl``, reward models, Mamba and a ``trainer_cls`` have the callback alone, with a line in the
    log of ``residency``: a plugin's class would take the place of Axolotl's choice there.

    Raises:
        RefusedError: This Axolotl has no such hooks; raised when the plugin is loaded.
    """

    def get_input_args(self) -> str:
        """Returns the path of the keys for Axolotl.

        Raises:
            InvalidArgumentError: The configuration names this plugin under two names.
        """
        plugins = _module.PluginManager.get_instance().plugins
        names = sorted(
            name for name, plugin in plugins.items() if isinstance(plugin, ResidencyPlugin)
        )
        if len(names) > 1:
            raise _named_twice(names)
        return f"{ResidencyArgs.__module__}.{ResidencyArgs.__qualname__}"

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        """Returns the callback, which the trainer then has from its construction on.

        Not ``add_callbacks_post_trainer``: a resume loads the adapter before a callback that came
        later has heard of anything.
        """
        args = ResidencyArgs.of(cfg)
        settings = {
            name.removeprefix(_PREFIX): value
            for name, value in args.model_dump(exclude={"residency_max_in_flight"}).items()
        }
        return [_NamesItsKey(**settings)]

    def get_trainer_cls(self, cfg: Any) -> type | None:
        """Returns the class that Axolotl would take, with the mixin before it.

        Raises:
            RefusedError: This Axolotl has no ``AxolotlTrainer``.
        """
        trainers = load_framework("axolotl.core.trainers", install=_INSTALL)
        own = hook_in(trainers, "AxolotlTrainer", distribution="axolotl", remedy=_NEWER)
        base = self._of_another_plugin(cfg)
        if base is None:
            if any(cfg.get(key) for key in _OTHER_TRAINERS):
                return None
            base = None if cfg.get("model_config_type") == "mamba" else own
        if base is None or not issubclass(base, own):
            return None
        return _mixed_over(base, ResidencyArgs.of(cfg).residency_max_in_flight)

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Names in the log a trainer without the mixin, and the work that it does as before."""
        if not isinstance(trainer, ResidencyTrainerMixin):
            _log.warning(
                "%s trains with %s, which has the callback alone: saves and the reading of "
                "optimizer.pt are stock ones. If it comes from a plugin, name that plugin after "
                "%s; if it is your trainer_cls, put ResidencyTrainerMixin before its bases.",
                _who(),
                type(trainer).__name__,
                type(self).__name__,
            )

    def _of_another_plugin(self, cfg: Any) -> type | None:
        """Returns the trainer's class that another plugin brings, as Axolotl looks for it."""
        for plugin in _module.PluginManager.get_instance().plugins.values():
            found: type | None = None if plugin is self else plugin.get_trainer_cls(cfg)
            if found is not None:
                return found
        return None


class _NamesItsKey(ResidencyCallback):
    """The callback whose refusal names the key of the YAML."""

    def offload(self, optimizer: Any) -> None:
        try:
            super().offload(optimizer)
        except RefusedError as error:
            error.add_note(f"In the YAML of {_who()}: residency_offload: false")
            raise


@functools.cache
def _mixed_over(base: type, max_in_flight: int) -> type:
    """Makes the class of trainers over one of Axolotl's."""

    class Mixed(ResidencyTrainerMixin, base):  # type: ignore[misc]  # known when it runs
        """A trainer of Axolotl's with the mixin."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, max_in_flight=max_in_flight, **kwargs)

    Mixed.__name__ = Mixed.__qualname__ = f"Residency{base.__name__}"
    return Mixed


def _is_ours(name: object) -> bool:
    return str(name).rpartition(".")[2] == ResidencyPlugin.__name__


def _named_twice(names: list[str]) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"plugins of {_who()} has {' and '.join(names)}"
        f"{' twice' if len(names) == 1 else ', which are one plugin'}: name it once."
    )


def _who() -> str:
    return named_with_version("axolotl")
