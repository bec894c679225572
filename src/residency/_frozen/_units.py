"""Which modules of a model are units: the repeated blocks that hold most of its frozen bytes.

A unit is the part of a model whose frozen parameters come to the device and go together. Everything
that cannot be streamed exactly is refused here, by name, before anything moves.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from residency._dtensor import is_sharded
from residency._errors import InvalidArgumentError, RefusedError, listed
from residency._storages import is_dense, is_wrapper, storage_key
from residency._transfer import align_up
from residency._units import format_bytes

_MAX_NAMES = 3  # in a message


class FrozenParameter(NamedTuple):
    """A parameter to stream.

    Attributes:
        path: Its name in the unit.
        owner: The module that has it.
        key: Under which name that one does.
        parameter: The object.
    """

    path: str
    owner: nn.Module
    key: str
    parameter: nn.Parameter


class FoundUnit(NamedTuple):
    """A unit before anything moved.

    Attributes:
        name: Of the module, in the model.
        module: The one whose forward pass uses the parameters.
        frozen: The parameters, each once.
    """

    name: str
    module: nn.Module
    frozen: list[FrozenParameter]

    @property
    def num_bytes(self) -> int:
        """The bytes that the parameters take in one device allocation."""
        return sum(align_up(each.parameter.nbytes) for each in self.frozen)


def units_of(
    model: nn.Module, named: Iterable[nn.Module | str] | None, num_slots: int
) -> list[FoundUnit]:
    """Returns the units of a model, in the order in which it has them.

    Args:
        model: The whole.
        named: Modules of it, or their names; None finds its repeated blocks.
        num_slots: How many of them are on the device at once.

    Raises:
        InvalidArgumentError: A name or a module is none of the model's, or there are none.
        RefusedError: The parameters cannot be streamed exactly, or nothing would be freed.
    """
    names = {id(module): name for name, module in model.named_modules()}
    total = sum(_frozen_bytes(model).values())
    if not total:
        raise RefusedError(
            f"this {type(model).__name__} has no frozen parameters (requires_grad=False) with "
            "bytes. Nothing was changed; freeze the base first, or offload the optimizer instead."
        )
    modules = _blocks(model, total, num_slots) if named is None else _named(model, names, named)
    if not modules:
        raise RefusedError(
            f"this {type(model).__name__} has no list of repeated blocks with frozen parameters. "
            "Nothing was changed; name the modules to stream: units=[...]."
        )
    modules = list({id(module): module for module in modules}.values())
    _check(modules, names)
    shared = _shared_storages(model) | _used_outside(model, {id(each) for each in modules})
    found = [
        FoundUnit(names[id(module)], module, list(_to_stream(module, shared))) for module in modules
    ]
    found = [unit for unit in found if unit.frozen]
    if len(found) <= num_slots:
        raise RefusedError(
            f"this {type(model).__name__} has {len(found)} units with frozen parameters, "
            f"{listed([unit.name for unit in found], _MAX_NAMES)}, for {num_slots} slots, so that "
            "nothing would be freed. Nothing was changed; name more and smaller units: units=[...]."
        )
    all_bytes, largest = sum(u.num_bytes for u in found), max(found, key=lambda u: u.num_bytes)
    if all_bytes <= num_slots * largest.num_bytes:
        raise RefusedError(
            f"the units of this {type(model).__name__} have {format_bytes(all_bytes)} of frozen "
            f"parameters, and {num_slots} slots of the largest, {largest.name}, "
            f"{format_bytes(num_slots * largest.num_bytes)}, so that nothing would be freed. "
            "Nothing was changed; name units of like sizes: units=[...]."
        )
    return found


# ----------------------------------------------------------------------------------- which modules


def _blocks(model: nn.Module, total: int, num_slots: int) -> list[nn.Module]:
    """Returns the members of the outermost lists of alike modules; of one whose largest members
    would fill half of the device's share, the lists within, if those have most of its bytes.
    """
    members = _alike(model)
    inner = [unit for child in model.children() for unit in _blocks(child, total, num_slots)]
    if not members:
        return inner
    sizes = {id(each): _sum_of(each) for each in members}
    is_fine = num_slots * max(sizes.values()) <= total // 2
    is_inner_most = 2 * sum(map(_sum_of, inner)) >= sum(sizes.values())
    return members if is_fine or not is_inner_most else inner


def _alike(module: nn.Module) -> list[nn.Module]:
    """Returns the members of a list of modules that have frozen parameters, if each class among
    them comes twice on average.
    """
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return []
    members = [each for each in module.children() if _frozen_bytes(each)]
    kinds = {type(each) for each in members}
    return members if members and 2 * len(kinds) <= len(members) else []


def _frozen_bytes(module: nn.Module) -> dict[int, int]:
    """Returns the bytes of each frozen parameter by its ``id``."""
    return {id(p): p.nbytes for p in module.parameters() if not p.requires_grad and p.nbytes}


def _sum_of(module: nn.Module) -> int:
    return sum(_frozen_bytes(module).values())


def _named(
    model: nn.Module, names: dict[int, str], named: Iterable[nn.Module | str]
) -> list[nn.Module]:
    modules: list[nn.Module] = []
    for each in [named] if isinstance(named, nn.Module | str) else named:
        module: Any = each
        if isinstance(each, str):
            module = dict(model.named_modules()).get(each)
        if not isinstance(module, nn.Module) or id(module) not in names:
            raise InvalidArgumentError(
                f"units has {each if isinstance(each, str) else type(each).__name__!r}, which is "
                f"no module of this {type(model).__name__}; expected its modules, or their names "
                "as model.named_modules() has them."
            )
        # A list is never called itself.
        modules += list(module.children()) if isinstance(module, nn.ModuleList) else [module]
    if not modules:
        raise InvalidArgumentError("units is empty; expected modules, or their names.")
    return modules


# ---------------------------------------------------------------------------------- what is refused


def _check(modules: Sequence[nn.Module], names: dict[int, str]) -> None:
    """Refuses units that share parameters, and such as something else moves or calls."""
    first: dict[int, str] = {}
    for module in modules:
        name = names[id(module)]
        for path, part in module.named_modules(prefix=name):
            _refuse_kind(path, part)
        for path, parameter in module.named_parameters(prefix=name):
            _refuse_parameter(path, parameter)
            other = first.setdefault(id(parameter), name)
            if other != name and not parameter.requires_grad:
                raise RefusedError(
                    f"the units {other} and {name} share {path} "
                    f"({format_bytes(parameter.nbytes)}). Nothing was changed; name units that "
                    "share no parameters and do not lie within one another: units=[...]."
                )


def _refuse_kind(path: str, part: nn.Module) -> None:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    kind = ""
    if fsdp is not None and isinstance(part, fsdp.FSDPModule | fsdp.FullyShardedDataParallel):
        kind = "wrapped by FSDP, which moves the parameters itself"
    elif isinstance(part, torch.jit.ScriptModule):
        kind = "a script, whose calls cannot be heard"
    # torch has no public way to ask whether `Module.compile` was called.
    elif part._compiled_call_impl is not None or (
        dynamo is not None and isinstance(part, dynamo.OptimizedModule)
    ):
        kind = "compiled, and compiled code keeps the parameters' addresses"
    elif getattr(getattr(part, "_hf_hook", None), "offload", False):
        kind = "offloaded by accelerate's hooks, which move the parameters themselves"
    if kind:
        raise RefusedError(
            f"{path} of class {type(part).__name__} is {kind}. Nothing was changed; stream the "
            "plain module."
        )


def _refuse_parameter(path: str, parameter: Any) -> None:
    why = ""
    if is_lazy(parameter):
        why = "has no shape yet; run the model once first"
    elif is_sharded(parameter):
        why = "is a shard of a DTensor; stream the plain model"
    elif parameter.is_meta:
        why = "is on the meta device and has no bytes; load it first"
    elif parameter.is_inference():
        why = "was made in inference mode, in which nothing can be trained; load it outside"
    if why:
        raise RefusedError(f"{path} {why}. Nothing was changed.")


def _shared_storages(model: nn.Module) -> set[int]:
    """Returns the storages over which the model has more than one tensor."""
    once: set[int] = set()
    twice: set[int] = set()
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]  # each object once
    for tensor in tensors:
        if tensor.layout is torch.strided and not is_wrapper(tensor):
            key = storage_key(tensor)
            (twice if key in once else once).add(key)
    return twice


def _used_outside(module: nn.Module, units: set[int]) -> set[int]:
    """Returns the storages of the parameters that modules outside of all units have, too."""
    left, seen, found = [module], set(units), set()
    while left:
        part = left.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        left += part.children()
        own = (p for p in part._parameters.values() if p is not None and not is_wrapper(p))
        found |= {storage_key(p) for p in own if p.layout is torch.strided}
    return found


def _to_stream(module: nn.Module, shared: set[int]) -> Iterator[FrozenParameter]:
    """Yields the frozen parameters of a unit that are plain bytes of their own; others stay on the
    device.
    """
    seen: set[int] = set()
    for prefix, owner in module.named_modules():
        for key, parameter in owner._parameters.items():
            if parameter is None or parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            is_plain = parameter.layout is torch.strided and not is_wrapper(parameter)
            if not is_plain or not parameter.nbytes or not is_dense(parameter):
                continue
            if storage_key(parameter) not in shared and not parameter.is_conj():
                yield FrozenParameter(f"{prefix}.{key}".removeprefix("."), owner, key, parameter)
