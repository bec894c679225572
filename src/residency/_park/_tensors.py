"""Which tensors a module or an optimizer has, each with its site: the name of its place there.

Everything that is moved together is named here: parameters, buffers, gradients, tensors that a
module has as plain attributes over the same storages, FSDP2's own views of its shards, and the
state of an optimizer. Only plain tensors come out: of a ``DTensor`` the local one, of another
wrapper what is inside.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

# no public name (torch 2.13)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from residency._dtensor import local_of
from residency._errors import RefusedError
from residency._storages import storage_key
from residency._transfer import owner_of, refuse_hidden_state, state_stays

Owner = nn.Module | Optimizer
Gradients = Literal["move", "drop"]
Taken = tuple[Any, str, Tensor]  # who had a gradient, under which name, and the gradient
_Named = Iterator[tuple[str, Tensor]]
_TABLES = ("_parameters", "_buffers", "_modules")


def tensors_of(owner: Owner, *, gradients: Gradients = "move") -> list[tuple[str, Tensor]]:
    """Returns the plain tensors of an owner, gradients first, with their sites.

    Raises:
        RefusedError: One of them is of a kind whose bytes cannot be moved.
    """
    if isinstance(owner, Optimizer):
        return list(_state(owner))
    if isinstance(owner, torch.jit.ScriptModule):
        raise RefusedError(
            f"this {type(owner).__name__} is a script, whose uses cannot be watched. Nothing "
            "moved; park the module that it was made of."
        )
    own = list(_own(owner))
    storages = {storage_key(tensor) for _, tensor in own}
    # Plain attributes are the caller's own affair, but for those that see the same bytes.
    followers = [
        (site, tensor) for site, tensor in _attributes(owner) if storage_key(tensor) in storages
    ]
    moving = [] if gradients == "drop" else list(gradients_of(owner))
    return [*moving, *own, *followers]


def gradients_of(module: nn.Module) -> _Named:
    """Yields the gradients of a module's parameters, those that FSDP2 has not reduced included."""
    for site, tensor in _raw(module):
        if tensor.grad is not None:
            yield from _plain(f"{site}.grad", tensor.grad)
    for group in fsdp_groups(module):
        for site, _, _, tensor in _unreduced(group):
            yield from _plain(site, tensor)


def take_gradients(module: nn.Module, taken: list[Taken]) -> None:
    """Sets all gradients of a module to None; notes each before, for `give_back_gradients`."""
    holders: list[Taken] = [(t, "grad", t.grad) for _, t in _raw(module) if t.grad is not None]
    for group in fsdp_groups(module):
        holders += [(holder, name, gradient) for _, holder, name, gradient in _unreduced(group)]
    for holder, name, gradient in holders:
        taken.append((holder, name, gradient))
        setattr(holder, name, None)


def give_back_gradients(taken: list[Taken]) -> None:
    """Sets gradients that `take_gradients` took; not those whose parameters are parked by now."""
    for holder, name, gradient in taken:
        if not isinstance(holder, Tensor) or holder.device == gradient.device:
            setattr(holder, name, gradient)


def _raw(module: nn.Module) -> _Named:
    for path, part in module.named_modules():
        for table in (part._parameters, part._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    yield f"{path}.{name}".removeprefix("."), tensor


def _own(module: nn.Module) -> _Named:
    for site, tensor in _raw(module):
        yield from _plain(site, tensor)
    for group in fsdp_groups(module):
        for parameter in group.fsdp_params:
            site = f"{parameter._param_fqn or id(parameter)}.fsdp"
            # FSDP2 has no public name for the bytes under a shard, padding included.
            yield from _plain(site, parameter._sharded_param_data)
            yield from _plain(f"{site}.sharded", parameter.sharded_param)


def _attributes(module: nn.Module) -> _Named:
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            site = f"{path}.{name}".removeprefix(".")
            if name in _TABLES:
                continue
            entries: Iterable[tuple[object, Any]] = [("", value)]
            if isinstance(value, list | tuple):
                entries = enumerate(value)
            elif isinstance(value, dict):
                entries = value.items()
            for key, each in entries:
                if type(each) in (Tensor, nn.Parameter) and each.layout is torch.strided:
                    yield f"{site}.{key}", each


def _state(optimizer: Optimizer) -> _Named:
    if (owner := owner_of(optimizer)) is not None:
        for site, tensor in owner.staying(optimizer).items():  # the rest is at home on the host
            yield from _plain(site, tensor)
        return
    refuse_hidden_state(optimizer, "park its model alone")
    with state_stays():  # what waits is on the host already
        state = optimizer.state
    for index, values in enumerate(state.values()):
        yield from _values(f"state.{index}", values)


def _values(site: str, value: object) -> _Named:
    if isinstance(value, Tensor):
        yield from _plain(site, value)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _values(f"{site}.{key}", each)
    elif isinstance(value, list | tuple):
        for key, each in enumerate(value):
            yield from _values(f"{site}.{key}", each)


def _plain(site: str, tensor: Tensor) -> _Named:
    tensor = local_of(tensor)
    if is_lazy(tensor):
        raise RefusedError(f"{site} has no shape yet; run the module once first. Nothing moved.")
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):
        for name in wrapper.__tensor_flatten__()[0]:
            yield from _plain(f"{site}.{name}", getattr(wrapper, name))
        return
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = f"{type(tensor).__name__} of dtype {tensor.dtype} and layout {tensor.layout}"
        raise RefusedError(
            f"{site} is a {kind}; only dense tensors can be parked. Nothing moved; park the "
            "modules without it."
        )
    if tensor.is_meta:
        raise RefusedError(
            f"{site} is on the meta device and has no bytes. Nothing moved; load it first."
        )
    yield site, tensor


# ------------------------------------------------------------------------------------------ FSDP2


def fsdp_groups(module: nn.Module) -> Iterator[Any]:
    """Yields the parameter groups of all FSDP2 modules in a module."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    part: Any  # an FSDPModule is a class of its own beside the module's
    for part in module.modules():
        if isinstance(part, fsdp.FSDPModule):
            state: Any = part._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:  # torch 2.11 has one
                groups = [state._fsdp_param_group] if state._fsdp_param_group else []
            yield from groups


def reshard(module: nn.Module) -> None:
    """Frees what FSDP2 has gathered, so that the shards alone are left.

    Raises:
        RefusedError: A gather is under way, or the module is within its forward or backward.
    """
    for group in fsdp_groups(module):
        if group._all_gather_result is not None or group._training_state.name != "IDLE":
            raise RefusedError(
                "an FSDP module is within its forward or backward, or gathers its parameters. "
                "Nothing moved; park it between steps."
            )
    for group in fsdp_groups(module):
        group.reshard()
        for parameter in group.fsdp_params:
            parameter._sharded_post_forward_param = None
            parameter._sharded_post_forward_param_data = None


def _unreduced(group: Any) -> Iterator[tuple[str, Any, str, Tensor]]:
    """Yields gradients that wait for a reduction: site, who has it, under which name."""
    for parameter in group.fsdp_params:
        site = f"{parameter._param_fqn or id(parameter)}.fsdp"
        accumulated = parameter.unsharded_accumulated_grad
        if accumulated is not None:
            yield f"{site}.accumulated", parameter, "unsharded_accumulated_grad", accumulated
        whole = parameter.__dict__.get("_unsharded_param")
        if whole is not None and whole.grad is not None:
            yield f"{site}.whole.grad", whole, "grad", whole.grad
    partial = getattr(group, "_partial_reduce_output", None)
    if partial is not None:
        yield f"{id(group)}.partial", group, "_partial_reduce_output", partial
