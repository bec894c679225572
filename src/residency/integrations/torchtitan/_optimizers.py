"""The container of torchtitan's optimizers whose state lives on the host.

Invariant, which ``tests/integrations/test_torchtitan.py`` tries to break: groups, hooks, names and
the state dict are those of torchtitan's own container, which builds the optimizers; each is
offloaded after that.

[Note: state in bfloat16] With ``implementation="fused_opt_states_bf16"`` torchtitan's container
gives each optimizer a hook that makes moments in bfloat16 before the first step finds none. A
template of ``prime`` would be one of float32, and would be what the hook finds. So the moments are
made before the offload, in bfloat16 and on the host, and the hook finds those.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from residency._dtensor import remade
from residency._optim import offload_optimizer, parse_bucket
from residency._units import parse_bytes
from residency.integrations.torchtitan._published import published

_Container: Any = published("torchtitan.components.optimizer", "OptimizersContainer")
_IN_BFLOAT16 = "fused_opt_states_bf16"


class OffloadedOptimizers(_Container):  # type: ignore[misc]  # known when it runs
    """Torchtitan's ``OptimizersContainer`` with the state of its optimizers on the host.

    Built by its own ``Config``, which the override ``offload_optimizers`` puts in the place of
    torchtitan's. A state dict needs no step with zero gradients: before the first step it has
    templates on the host, into which a load goes. The figures of each optimizer are at
    ``container.optimizers[0].statistics()``.

    Args:
        config: A ``Config`` of this class.
        model_parts: As torchtitan's container takes them.

    Raises:
        InvalidArgumentError: A size does not parse, or there are no slots.
        RefusedError: One of the optimizers cannot be offloaded exactly, or the host has no room.

    Memory:
        As with ``residency.offload_optimizer``, for each optimizer of the container; they step one
        after the other. With ``implementation="fused_opt_states_bf16"``, for which moments are made
        before the first step: host memory for one optimizer's moments twice, for a moment; and a
        parameter that never has a gradient has moments, too, which are zero.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_Container.Config):  # type: ignore[misc]  # known when it runs
        """The fields of torchtitan's, and the settings of ``residency.offload_optimizer``.

        Attributes:
            resident: As in ``residency.offload_optimizer``.
            bucket: As there.
            slots: As there.
            master_weights: As there.
        """

        resident: int | str = 0
        bucket: int | str | None = None
        slots: int = 3
        master_weights: bool = False

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        """Builds torchtitan's container, and offloads what is in it."""
        parse_bytes(config.resident, name="resident")  # before anything is built
        parse_bucket(config.bucket)
        super().__init__(config, model_parts=model_parts)
        for optimizer in self.optimizers:
            if config.implementation == _IN_BFLOAT16:
                _make_bfloat16_state(optimizer)
            offload_optimizer(
                optimizer,
                resident=config.resident,
                bucket=config.bucket,
                slots=config.slots,
                master_weights=config.master_weights,
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns torchtitan's flat state dict; the tensors are the homes themselves."""
        self._prime()
        found: dict[str, Any] = super().state_dict()
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads torchtitan's flat state dict into the homes."""
        self._prime()
        super().load_state_dict(state_dict)

    def _prime(self) -> None:
        """Makes templates where torchtitan would take a step with zero gradients."""
        for optimizer in self.optimizers:
            if not optimizer.state:
                optimizer.prime()


def _make_bfloat16_state(optimizer: Optimizer) -> None:
    """Makes on the host what torchtitan's hook makes on the device. [Note: state in bfloat16]"""
    if not isinstance(optimizer, torch.optim.Adam):  # AdamW is one; the hook has these alone
        return
    zeros = partial(torch.zeros_like, dtype=torch.bfloat16, device="cpu")
    for group in optimizer.param_groups:
        keys = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group.get("amsgrad") else [])]
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32),
                **{key: remade(parameter, zeros) for key in keys},
            }
