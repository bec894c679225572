"""Says what only an object's own ``state_dict`` and ``load_state_dict`` know of it.

[Note: an object's own pair] Where both methods are torch's own and no hook stands in them, the
tensors of an object are all of its state: they are written in place, and neither method is called.
Everything else goes back through the object's own ``load_state_dict``, which finds in the state
dict the tensors that are there already. A save asks here whether that method takes what
``state_dict`` gave, and a restore asks here what to give it, so that what was saved can be restored
into the same objects. ``tests/checkpoint/restore/test_own_pairs.py`` compares with torch's pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from residency._checkpoint._capture._wrappers import clean_names, place_of, plain_optimizer
from residency._dtensor import local_of
from residency._storages import storage_key, strided_as
from residency._transfer import defining_class

# What torch registers in here prepares a copy into the tensors (FSDP, weight_norm) or takes the
# names of older versions, and changes no value. That of torch.ao does.
_TORCHS_OWN = ("torch.nn.", "torch.distributed.", "torch._dynamo.")
_LOAD_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_OPTIMIZER_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
_STATE_METHODS = ("state_dict", "load_state_dict")


class ModuleEntry(NamedTuple):
    """An entry of a module's state dict.

    Attributes:
        raw: Its name there.
        value: What it is.
        is_made: Whether it was made for the state dict, and is no memory that the module has.
    """

    raw: str
    value: Any
    is_made: bool


class ModuleState:
    """The state of a module, as its own ``state_dict`` gives it.

    Args:
        module: Without wrappers around it.

    Attributes:
        parameters: Its parameters.
        entries: The entries of its state dict by their names without what wrappers add.
        metadata: The versions of its parts, as torch's state dict has them.
        is_loaded: Whether a restore has to call ``load_state_dict``. [Note: an object's own pair]
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        found = module.state_dict(keep_vars=True)
        self.metadata: Any = getattr(found, "_metadata", None)
        self.parameters = set(module.parameters())
        tensors = self.parameters.union(module.buffers())
        strangers = {
            raw: value
            for raw, value in found.items()
            if isinstance(value, Tensor) and value not in tensors and not is_lazy(value)
        }
        if strangers:  # a few, as nearly always none
            own = set(map(memory_key, tensors)) - {None}
            strangers = {raw: v for raw, v in strangers.items() if memory_key(v) not in own}
        # What is handed out twice as the same memory is the module's, though it is no buffer.
        again = module.state_dict(keep_vars=True) if strangers else {}
        made = {raw for raw, value in strangers.items() if not _is_same(value, again.get(raw))}
        self.entries = {
            name: ModuleEntry(
                raw, value, raw in made or is_lazy(value) or not isinstance(value, Tensor)
            )
            for name, (raw, value) in zip(clean_names(module, found), found.items(), strict=True)
        }
        is_any_made = any(entry.is_made for entry in self.entries.values())
        self.is_loaded = is_any_made or _loads_whole(module) or _is_any_part_own(module)

    @cached_property
    def memory(self) -> set[int | None]:
        """The memory of the parameters."""
        return set(map(memory_key, self.parameters)) - {None}

    def is_taken(self, entry: ModuleEntry) -> bool:
        """Returns whether the module's ``load_state_dict`` takes an entry that was made."""
        if _loads_whole(self._module):
            return True
        place = place_of(self._module, entry.raw)
        if any(_loads_its_own_way(part) for part in place.parts):
            return True
        part, rest = place.parts[-1], place.rest
        if rest == "_extra_state":
            return type(part).set_extra_state is not nn.Module.set_extra_state
        buffers = part._buffers.keys() - part._non_persistent_buffers_set
        return isinstance(entry.value, Tensor) and rest in part._parameters.keys() | buffers

    def is_of_a_parameter(self, entry: ModuleEntry) -> bool:
        """Returns whether an entry stands below the name of a parameter, which its class describes
        there, as bitsandbytes' does.
        """
        place = place_of(self._module, entry.raw)
        name, _, below = place.rest.partition(".")
        return bool(below) and name in place.parts[-1]._parameters

    def takes_other_shapes(self, entry: ModuleEntry) -> bool:
        """Returns whether the part that has a tensor may give it the shape of a saved one."""
        if is_lazy(entry.value):
            return True
        return _loads_its_own_way(place_of(self._module, entry.raw).parts[-1])


def memory_key(tensor: Tensor) -> int | None:
    """Returns what tensors over one memory have in common; None where that cannot be said."""
    local = local_of(tensor)
    if is_lazy(tensor) or local.layout is not torch.strided:
        return None
    return storage_key(local)


def _is_same(left: Tensor, right: object) -> bool:
    if not isinstance(right, Tensor) or memory_key(left) is None:
        return left is right
    is_one = memory_key(left) == memory_key(right)
    return is_one and strided_as(local_of(left)) == strided_as(local_of(right))


def _is_any_part_own(module: nn.Module) -> bool:
    known: dict[type, bool] = {}
    return any(_has_own_part(part, known) for part in module.modules())


def _has_own_part(part: nn.Module, known: dict[type, bool]) -> bool:
    kind = type(part)
    if kind not in known:
        known[kind] = _overrides_loading(part)
    return known[kind] or any(_hooks_of(part, _LOAD_HOOKS))


def _loads_whole(module: nn.Module) -> bool:
    is_torchs = type(module).load_state_dict is nn.Module.load_state_dict
    return not is_torchs or "load_state_dict" in vars(module)


def _loads_its_own_way(part: nn.Module) -> bool:
    return _overrides_loading(part) or any(_hooks_of(part, _LOAD_HOOKS[:1]))


def _overrides_loading(part: nn.Module) -> bool:
    if "_load_from_state_dict" in vars(part):
        return True
    return not _is_torchs(defining_class(type(part), "_load_from_state_dict").__module__)


def _hooks_of(part: nn.Module, names: tuple[str, ...]) -> Iterator[Callable[..., object]]:
    for name in names:
        for hook in vars(part).get(name, {}).values():
            if not _is_torchs(getattr(hook, "__module__", "")):
                yield hook


def _is_torchs(file: str) -> bool:
    return f"{file}.".startswith(_TORCHS_OWN)


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """The state of an optimizer as its own ``state_dict`` gives it, in torch's form.

    Attributes:
        by_parameter: The values of each parameter.
        by_other_key: What else stands in ``state``.
        groups: Its groups, without their parameters.
        others: What stands beside ``state`` and ``param_groups``.
    """

    by_parameter: Mapping[Tensor, Mapping[str, object]]
    by_other_key: Mapping[object, object]
    groups: list[dict[str, object]]
    others: Mapping[str, object]


def has_own_pair(value: object) -> bool:
    """Returns whether an optimizer or a ``GradScaler`` has methods of its own, or hooks, in the
    place of torch's ``state_dict`` and ``load_state_dict``.
    """
    known = vars(value)
    if any(known.get(name) for name in _OPTIMIZER_HOOKS):
        return True
    torchs = (Optimizer, torch.amp.GradScaler)
    return any(
        name in known or defining_class(type(value), name) not in torchs for name in _STATE_METHODS
    )


def own_state(optimizer: Optimizer) -> OptimizerState | None:
    """Returns the state that an optimizer with an own pair says that it has; None where it has
    another form than torch's, as that of one which only stands around another one.
    """
    if not {"state", "param_groups"} <= vars(optimizer).keys():
        return None
    saved: Any = optimizer.state_dict()
    state, groups = (saved.get(key) for key in ("state", "param_groups"))
    if not (isinstance(state, Mapping) and isinstance(groups, list)):
        return None
    mine = [group["params"] for group in optimizer.param_groups]
    if [len(group.get("params", ())) for group in groups] != [len(params) for params in mine]:
        return None
    parameters = {
        number: parameter
        for group, params in zip(groups, mine, strict=True)
        for number, parameter in zip(group["params"], params, strict=True)
    }
    return OptimizerState(
        {parameters[key]: values for key, values in state.items() if key in parameters},
        {key: values for key, values in state.items() if key not in parameters},
        [{k: v for k, v in group.items() if k != "params"} for group in groups],
        {k: v for k, v in saved.items() if k not in ("state", "param_groups")},
    )


def is_whole_object(value: object) -> bool:
    """Returns whether an optimizer or a scaler is saved as any object with both methods is: as the
    state dict that it gives, which it takes back.
    """
    if isinstance(value, torch.amp.GradScaler):
        return has_own_pair(value)
    optimizer = plain_optimizer(value)
    return has_own_pair(optimizer) and own_state(optimizer) is None
