"""Float32 copies of low-precision parameters, which the optimizer steps in their place.

A master is a state like any other: it lives at home, travels in the same buckets and is saved under
the key ``master_weight``. Invariant: rounded to the parameter's dtype, a master is the parameter;
where somebody else has written to the parameter, the master takes the new value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from residency._errors import RefusedError
from residency._transfer import local_of, wrapped_like

MASTER = "master_weight"


def needs_master(parameter: Tensor) -> bool:
    """Says whether a parameter is of those that masters are for."""
    return parameter.dtype in (torch.bfloat16, torch.float16)


def check_masters_place(name: str, is_wanted: bool, device: torch.device) -> None:
    """Checks that masters, where they are wanted, can be stepped on ``device``.

    Raises:
        RefusedError: It is the host, where nothing streams.
    """
    if is_wanted and device.type == "cpu":
        raise RefusedError(
            f"{name} has its parameters on the host, where nothing streams, so there is no step "
            "on master weights. Move the model to the device first."
        )


def master_like(parameter: Tensor) -> Tensor:
    """Returns what a master looks like, on meta."""
    local = local_of(parameter).detach()
    return wrapped_like(torch.empty_like(local, dtype=torch.float32, device="meta"), parameter)


def as_masters_state(value: Tensor, parameter: Tensor) -> Tensor:
    """Returns a state as a master's step needs it: in float32 where it is shaped as the parameter
    and of low precision.
    """
    is_low = value.is_floating_point() and value.element_size() < torch.float32.itemsize
    if not is_low or local_of(value).shape != local_of(parameter).shape:
        return value
    return wrapped_like(local_of(value).detach().float(), value)


def versions_of(parameter: Tensor) -> tuple[int, int]:
    """Returns what changes when somebody writes to a parameter, ``.data`` aside."""
    return parameter._version, local_of(parameter)._version


def take_foreign_writes(master: Tensor, low: Tensor) -> None:
    """Gives a master the elements that are not its own rounded ones any more.

    Memory:
        Device bytes of ``low`` and of a mask, and a float32 copy, while it runs.
    """
    is_foreign = low != master.to(low.dtype)
    torch.where(is_foreign, low.float(), master, out=master)
