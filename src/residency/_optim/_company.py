"""What a parameter's step takes from the company of others, though no value passes between them.

``torch.optim.SGD`` multiplies all momentum buffers of a list at once, and one by one where any
parameter of the list has none yet. The two round a low-precision buffer differently where the
device's kernels for lists do, as those of a CPU. A unit of a step is a part of the list, so it gets
a parameter without elements and without a buffer where the whole list has one that lacks it.

Source: ``torch.optim.sgd._multi_tensor_sgd``, ``all_states_with_momentum_buffer``; read in 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from residency._modes import callers_modes_off
from residency._optim._plan import Members
from residency._optim._state import ParameterState

Company = tuple[tuple[int, Tensor], ...]


def company_of(
    optimizer: Optimizer,
    base: type[Optimizer],
    members: Members,
    inners: Sequence[ParameterState | None],
) -> Company:
    """Returns parameters without elements, by the index of their group, for every unit of a step.

    Args:
        optimizer: Is not changed.
        base: Its class.
        members: The parameters of the step.
        inners: The state of each.
    """
    if base is not torch.optim.SGD:
        return ()
    have_buffer = [i is not None and dict.get(i, "momentum_buffer") is not None for i in inners]
    if len(set(have_buffer)) < 2:
        return ()  # as nearly always
    found: dict[tuple[int, torch.dtype, torch.device], set[bool]] = {}
    for (index, parameter), has_buffer in zip(members, have_buffer, strict=True):
        group = optimizer.param_groups[index]
        # A fused step takes no list in which only some have a buffer.
        if group["momentum"] and not group.get("fused"):
            found.setdefault((index, parameter.dtype, parameter.device), set()).add(has_buffer)
    return tuple(
        (index, _without_elements(dtype, device))
        for (index, dtype, device), kinds in found.items()
        if len(kinds) > 1
    )


@callers_modes_off()
def _without_elements(dtype: torch.dtype, device: torch.device) -> Tensor:
    made = torch.nn.Parameter(torch.empty(0, dtype=dtype, device=device))
    made.grad = torch.empty_like(made)
    return made
