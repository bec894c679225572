"""The overrides that ``--override.imports`` names: each puts a config of ours in another's place.

Torchtitan finds an override under the module and the name that a user gives, which is the door of
this package, and calls it with the config that it is to replace, before anything is built.
Invariant, which ``tests/integrations/test_torchtitan.py`` tries to break: what is not understood is
refused, as torchtitan would go on with a default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from residency._errors import InvalidArgumentError, RefusedError
from residency._optim import parse_bucket
from residency._units import parse_bytes
from residency.integrations._common._framework import named_with_version
from residency.integrations.torchtitan._checkpoints import ResidencyCheckpointManager
from residency.integrations.torchtitan._optimizers import OffloadedOptimizers
from residency.integrations.torchtitan._published import published

_DOOR = __name__.rpartition(".")[0]
_derive: Any = published("torchtitan.config", "derive")
_override: Any = published("torchtitan.config", "override")


def offload_optimizers(
    config: Any,
    *,
    resident: int | str = 0,
    bucket: int | str | None = None,
    slots: int = 3,
    master_weights: bool = False,
    **unknown: object,
) -> Any:
    """Returns a config of `OffloadedOptimizers` with the fields of torchtitan's.

    Named on the command line, with settings or without:
    ``--override.imports 'residency.integrations.torchtitan.offload_optimizers={"slots": 2}'``.

    Args:
        config: The ``OptimizersContainer.Config`` that it replaces.
        resident: As in ``residency.offload_optimizer``.
        bucket: As there.
        slots: As there.
        master_weights: As there.
        unknown: Is refused.

    Raises:
        InvalidArgumentError: There is no such setting, or a size does not parse.
        RefusedError: The config is of another container, or offloads already.
    """
    settings: dict[str, int | str | bool | None] = {
        "resident": resident,
        "bucket": bucket,
        "slots": slots,
        "master_weights": master_weights,
    }
    _refuse_unknown("offload_optimizers", unknown, settings)
    parse_bytes(resident, name="resident")  # now, and not after minutes of building a model
    parse_bucket(bucket)
    _refuse_others("offload_optimizers", "optimizer", config, OffloadedOptimizers)
    return _derive(config, OffloadedOptimizers.Config, **settings)


def save_with_residency(config: Any, *, spare: int | str | None = None, **unknown: object) -> Any:
    """Returns a config of `ResidencyCheckpointManager` with the fields of torchtitan's.

    Named on the command line, with settings or without:
    ``--override.imports residency.integrations.torchtitan.save_with_residency``.

    Args:
        config: The ``CheckpointManager.Config`` that it replaces.
        spare: As in ``residency.integrations.dcp.PinnedStager``.
        unknown: Is refused.

    Raises:
        InvalidArgumentError: There is no such setting, or ``spare`` does not parse.
        RefusedError: The config is of another manager, or is one of this class already.
    """
    _refuse_unknown("save_with_residency", unknown, {"spare": spare})
    if spare not in (None, "all"):
        parse_bytes(spare, name="spare")
    _refuse_others("save_with_residency", "checkpoint", config, ResidencyCheckpointManager)
    return _derive(config, ResidencyCheckpointManager.Config, spare=spare)


def _refuse_unknown(
    override: str, unknown: Mapping[str, object], known: Mapping[str, object]
) -> None:
    if unknown:
        example = f"{_DOOR}.{override}={json.dumps(dict(known))}"
        raise InvalidArgumentError(
            f"{override} has no setting {', '.join(map(repr, sorted(unknown)))}. With "
            f"{named_with_version('torchtitan')} it takes {', '.join(known)}: "
            f"--override.imports '{example}'"
        )


def _refuse_others(override: str, field: str, config: Any, ours: Any) -> None:
    """Refuses a config whose owner does something that would be lost."""
    base = ours.__mro__[1]
    if isinstance(config, ours.Config):
        raise RefusedError(
            f"config.{field} is a {ours.__name__}.Config already, and {override} would replace "
            "it. Nothing was changed: leave the override out, or use torchtitan's own config."
        )
    if type(config) is not base.Config:
        raise RefusedError(
            f"config.{field} is a {type(config).__qualname__}, and {override} replaces the "
            f"{base.__qualname__}.Config of {named_with_version('torchtitan')} alone. Nothing was "
            f"changed: use that one, or make a subclass of {ours.__name__} with a Config of its "
            "own."
        )


# Torchtitan looks an override up under the name that the user gave.
for _function, _ours, _said in (
    (offload_optimizers, OffloadedOptimizers, "optimizer state on the host"),
    (save_with_residency, ResidencyCheckpointManager, "checkpoints of residency"),
):
    _function.__module__ = _DOOR
    _override(target=_ours.__mro__[1].Config, description=_said)(_function)
