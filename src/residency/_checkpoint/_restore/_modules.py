"""Restores modules in place: parameters and persistent buffers keep their identity and their ties.

[Note: hooks of a module] State-dict hooks decide which names there are, as in a save. What a hook
hands out that is no storage of the module, and ``_extra_state`` that is a tensor, goes through
``load_state_dict``, with its hooks; everything else is written in place, and load hooks do not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor, nn

from residency._checkpoint._capture._walk import clean_name, plain_module
from residency._checkpoint._document._encode import joined
from residency._checkpoint._restore._plan import RestorePlan
from residency._dtensor import local_of
from residency._storages import storage_key


def plan_module(
    plan: RestorePlan,
    module: nn.Module,
    *,
    prefix: str,
    saved: Iterable[str],
    stored_name: Callable[[str], str],
    fresh: Callable[[str], None],
    fetch: Callable[[str], Tensor],
) -> None:
    """Plans to fill a module's parameters and persistent buffers.

    Args:
        plan: Gets the tensors, and every difference.
        module: Filled in place; wrappers around it are seen through.
        prefix: What errors put before its names, such as ``"model."``.
        saved: The names in the checkpoint, below the module.
        stored_name: Returns a name's in the checkpoint.
        fresh: Plans a host tensor for a name in the checkpoint.
        fetch: Returns that tensor.
    """
    module = plain_module(module)
    own = _storages(module)
    names = dict.fromkeys(saved)
    found: dict[str, Tensor] = {}
    foreign: dict[str, str] = {}
    for raw, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            continue
        found[clean_name(module, raw)] = value
        if storage_key(local_of(value)) not in own:
            foreign[clean_name(module, raw)] = raw
    filled = {id(value) for name, value in found.items() if name in names}
    for name, value in found.items():
        if name not in names:
            # One name of a tied tensor is enough; many formats keep one only.
            if id(value) not in filled:
                plan.missing.append(prefix + name)
        elif name in foreign:
            fresh(stored_name(name))
        else:
            plan.fill(prefix + name, value, stored_name(name))
    plan.unexpected += [prefix + name for name in names if name not in found]
    taken = {name: raw for name, raw in foreign.items() if name in names}
    if taken:
        plan.after.append(
            lambda: _load(module, {r: fetch(stored_name(n)) for n, r in taken.items()})
        )


def set_extra_state(module: nn.Module, name: str, value: object) -> None:
    """Gives extra state to the part of a module that it belongs to."""
    module = plain_module(module)
    for path, part in module.named_modules(remove_duplicate=False):
        if clean_name(module, joined(path, "_extra_state")) == name:
            part.set_extra_state(value)
            return


def extra_state_names(module: nn.Module) -> set[str]:
    """Returns the names of extra state that is no tensor."""
    module = plain_module(module)
    values = module.state_dict(keep_vars=True).items()
    return {clean_name(module, raw) for raw, value in values if not isinstance(value, Tensor)}


def _storages(module: nn.Module) -> set[int]:
    tensors = (*module.parameters(), *module.buffers())
    return {storage_key(local_of(tensor)) for tensor in tensors}


def _load(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    module.load_state_dict(values, strict=False)
