"""What a ``DTensor`` is to an offload: its gradients, its layout, and what plans count of it.

Homes, slots and copies know local tensors only; whatever a caller or an optimizer's own step can
see is wrapped again. Invariant: a state of a sharded parameter is never seen without its wrapper,
because a checkpoint would take it for a replica and keep one rank's bytes.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from residency._transfer import align_up, is_sharded, local_of


@torch.no_grad()
def local_gradient(parameter: Tensor) -> Tensor:
    """Returns the gradient of a parameter's own shard, for a step on local tensors.

    A gradient with other placements, such as a partial sum, is redistributed: a collective, which
    all ranks of the mesh must call in one order.
    """
    gradient: Any = parameter.grad
    if is_sharded(gradient) and is_sharded(parameter):
        placements = parameter.placements  # type: ignore[attr-defined]
        if gradient.placements != placements:
            gradient = gradient.redistribute(placements=placements)
    return local_of(gradient).detach()


def has_partial_gradient(parameter: Tensor) -> bool:
    """Says whether the gradient of a replicated parameter is still to be summed over ranks.

    Some steps scale it before the sum, so only a step on ``DTensor`` has torch's bits.
    """
    gradient: Any = parameter.grad
    return (
        is_sharded(gradient)
        and is_sharded(parameter)
        and any(p.is_partial() for p in gradient.placements)
        # Then it is whole, or cut alike, on every rank: all of them call the collectives.
        and all(p.is_replicate() for p in parameter.placements)  # type: ignore[attr-defined]
    )


def layout_of(parameter: Tensor) -> Hashable:
    """Returns what a parameter's state was made for: shape, dtype, and where its shard lies."""
    if not is_sharded(parameter):
        return parameter.shape, parameter.dtype
    spec: Any = parameter._spec  # type: ignore[attr-defined]
    local = local_of(parameter)
    return parameter.shape, parameter.dtype, local.shape, spec.mesh, spec.placements


def planned_bytes(tensor: Tensor) -> int:
    """Returns the bytes that the largest shard of any rank takes, rounded up to the alignment.

    Plans count these, so that ranks with uneven shards plan alike: a step on ``DTensor`` has
    collectives, and they must come in one order everywhere.
    """
    count = tensor.numel()
    if is_sharded(tensor):
        lengths = list(tensor.shape)
        mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
        for dim, placement in enumerate(tensor.placements):  # type: ignore[attr-defined]
            if placement.is_shard():
                lengths[placement.dim] = -(-lengths[placement.dim] // mesh.size(dim))
        count = torch.Size(lengths).numel()
    return align_up(count * tensor.element_size())
