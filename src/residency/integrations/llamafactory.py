"""An optimizer plugin for LLaMA-Factory's v1, whose optimizers a configuration names.

Its default generation takes callbacks of Transformers, so there `ResidencyCallback` serves: see the
how-to. V1 has callbacks of its own, which get no optimizer, and a registry of optimizers. Nothing
of LLaMA-Factory is imported before it is asked for. Invariant, which
``tests/integrations/test_llamafactory.py`` tries to break: without further options the optimizer is
the AdamW that v1 builds when no optimizer is named.

Source: hiyouga/LLaMA-Factory ff6d4d12 (2026-08-18) and llamafactory 0.9.5,
``v1/core/base_trainer.py``, ``v1/utils/plugin.py`` and ``v1/config/training_args.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from residency._errors import InvalidArgumentError, RefusedError
from residency._optim import OffloadedOptimizer, offload_optimizer, parse_bucket
from residency._units import parse_bytes
from residency.integrations._common._framework import hook_in, load_framework, named_with_version
from residency.integrations._common._options import OURS, options_of, unknown_options

__all__ = ["register_optimizer"]

_NAME = "residency"
_BUILT = "optimizer"  # the option that names what is offloaded
# Where v1 has its registry: since 2026-08, and in 0.9.5.
_MODULES = (
    "llamafactory.v1.plugins.trainer_plugins.optimizers.optimizer",
    "llamafactory.v1.plugins.trainer_plugins.optimizer",
)
_INSTALL = "pip install 'llamafactory>=0.9.5'"


def register_optimizer(name: str = _NAME) -> None:
    """Registers an optimizer whose state lives on the host, for ``optim_config`` of v1.

    Call it before v1's trainer is made. ``optim_config: {name: residency}`` then builds AdamW;
    ``optimizer: SGD`` another class of ``torch.optim``; further keys are options of that class and
    of ``residency.offload_optimizer``. The optimizer is primed, so that neither a save nor a resume
    has to find out the form of its state.

    Args:
        name: The name by which ``optim_config`` finds it.

    Raises:
        ImportError: LLaMA-Factory is not installed; the message gives the line that installs it.
        InvalidArgumentError: The name is none.
        RefusedError: It has no registry of optimizers, or that has the name already.
    """
    if not isinstance(name, str) or not name:
        raise InvalidArgumentError(f"name is {name!r}; expected an optimizer plugin's name.")
    module = load_framework(*_MODULES, install=_INSTALL)
    plugin: Any = hook_in(
        module, "OptimizerPlugin", distribution="llamafactory", remedy=f"run: {_INSTALL}"
    )
    if name in getattr(plugin, "_registry", {}):  # of ours, too: v1 would put one over the other
        raise RefusedError(
            f"{_who()} has an optimizer plugin {name!r} already. Nothing was registered; call "
            "register_optimizer once, or pass another name."
        )
    plugin(name).register()(_build)


def _build(model: nn.Module, optim_config: Mapping[str, Any]) -> OffloadedOptimizer:
    """Builds the optimizer of a configuration; v1 calls it.

    Raises:
        InvalidArgumentError: A key or a size of the configuration is invalid.
        RefusedError: The optimizer cannot be stepped in parts with the same bits.
    """
    options = {key: value for key, value in optim_config.items() if key not in ("name", _BUILT)}
    base = _class_named(optim_config.get(_BUILT, "AdamW"))
    unknown = unknown_options(base, options)
    if unknown:
        raise InvalidArgumentError(
            f"optim_config of {_who()} has {', '.join(map(repr, unknown))}; expected {_BUILT}, "
            f"{', '.join(sorted(OURS))}, or an option of torch.optim.{base.__name__}, which are "
            f"{', '.join(sorted(options_of(base)))}."
        )
    if "lr" not in options:
        raise InvalidArgumentError(
            f"optim_config has no lr, and {_who()} does not hand learning_rate on to it. Set lr in "
            "optim_config."
        )
    own = {key: options.pop(key) for key in OURS & options.keys()}
    parse_bytes(own.get("resident", 0), name="optim_config.resident")
    parse_bucket(own.get("bucket"), name="optim_config.bucket")
    if isinstance(options.get("betas"), list):
        options["betas"] = tuple(options["betas"])  # as a YAML has them
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = offload_optimizer(base(trainable, **options), **own)
    assert isinstance(optimizer, OffloadedOptimizer)
    optimizer.prime()
    return optimizer


def _class_named(name: object) -> type[Optimizer]:
    found = vars(torch.optim).get(name) if isinstance(name, str) else None
    if not isinstance(found, type) or not issubclass(found, Optimizer) or found is Optimizer:
        raise InvalidArgumentError(
            f"optim_config.{_BUILT} is {name!r}; expected the name of a class of torch.optim, such "
            "as 'AdamW'."
        )
    return found


def _who() -> str:
    return named_with_version("llamafactory")
