"""``DTensor``: a wrapper of a local tensor, which holds this rank's bytes of a larger tensor.

The wrapper records which shard of the whole tensor they are. Copies know local tensors only;
whatever a caller or an optimizer's own step can see is wrapped again, with the mesh and the
placements that it had. Invariant, which ``tests/optim/test_distributed.py`` tries to break: a state
of a sharded parameter is never seen without its wrapper, because a checkpoint would take it for a
replica and keep one rank's bytes.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from residency._errors import RefusedError
from residency._modes import callers_modes_off

_PLAIN = frozenset((Tensor, torch.nn.Parameter))


def is_sharded(value: Any) -> bool:
    """Returns whether a value is a ``DTensor``, without importing that part of torch."""
    if type(value) in _PLAIN:  # nearly always, and asked for every state of every step
        return False
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def sharded_among(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the ``DTensor`` among tensors; asked of all parameters at every step."""
    if _PLAIN.issuperset(map(type, tensors)):
        return []
    return [tensor for tensor in tensors if is_sharded(tensor)]


def locals_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns ``local_of`` each tensor; asked of all parameters at every step."""
    if _PLAIN.issuperset(map(type, tensors)):
        return list(tensors)
    return [local_of(tensor) for tensor in tensors]


def local_of(tensor: Tensor) -> Tensor:
    """Returns the tensor with the bytes: that of a ``DTensor``, or the tensor itself."""
    if type(tensor) in _PLAIN or not is_sharded(tensor):
        return tensor
    local: Any = tensor._local_tensor  # type: ignore[attr-defined]  # to_local() is autograd's
    # A collective may still be under way; on the device, the current stream waits for it.
    return local.wait() if type(local).__name__ == "AsyncCollectiveTensor" else local  # type: ignore[no-any-return]


def write_count(tensor: Tensor) -> int:
    """Returns how often a tensor, or a view of it, was written in place; not through ``.data``."""
    # Autograd's own counter, for which torch has no public name (2.13).
    return int(local_of(tensor)._version)


def wrapped_like(local: Tensor, model: Tensor) -> Tensor:
    """Returns ``local`` as the shard of what ``model`` is; itself where that is no ``DTensor``.

    ``DTensor.from_local`` would move the bytes to the device of the mesh.
    """
    if not is_sharded(model) or is_sharded(local):
        return local
    spec: Any = model._spec  # type: ignore[attr-defined]
    if spec.tensor_meta.dtype != local.dtype:
        meta = spec.tensor_meta._replace(dtype=local.dtype)
        spec = dataclasses.replace(copy.copy(spec), tensor_meta=meta)
    with callers_modes_off():
        kind: Any = sys.modules["torch.distributed.tensor"].DTensor
        made: Tensor = kind(local, spec, requires_grad=False)
    return made


def remade(tensor: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
    """Makes a tensor of another one's bytes, and the same shard of it as that one is."""
    return wrapped_like(make(local_of(tensor).detach()), tensor)


def shard_offsets(name: str, tensor: Any, *, done: str) -> tuple[int, ...]:
    """Returns where in its whole tensor this rank's shard begins.

    Args:
        name: How the error calls it.
        tensor: A ``DTensor``.
        done: What is not done with it then, for the message.

    Raises:
        RefusedError: It is a partial sum, of which no rank has the value.
    """
    # no public name (torch 2.13); DCP computes a shard's place with it
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in tensor.placements):
        raise RefusedError(
            f"{name} is a DTensor with partial sums ({tensor.placements}), so that no rank has "
            f"the value. Nothing was {done}; redistribute it to Replicate() or Shard() first."
        )
    found: Any = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(found[1])


def moved(tensor: Tensor, device: torch.device, *, copy: bool = False) -> Tensor:
    """Returns a tensor with its bytes on another device, as the shard that it was."""
    with callers_modes_off():
        return remade(tensor, lambda local: local.to(device, copy=copy))


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
    """Returns whether the gradient of a replicated parameter is still to be summed over ranks.

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
