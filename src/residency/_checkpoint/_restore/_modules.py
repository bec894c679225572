"""Restores modules in place: parameters and persistent buffers keep their identity and their ties.

What else a module has in its state dict, and all that its hooks and methods do at a load, is the
business of its own ``load_state_dict``, which is called with the tensors as they are then: its
copies are of each onto itself, which torch leaves out. [Note: an object's own pair]
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from residency import _device
from residency._checkpoint._capture._own_pairs import ModuleEntry, ModuleState
from residency._checkpoint._capture._wrappers import plain_module
from residency._checkpoint._restore._plan import RestorePlan
from residency._checkpoint._restore._values import SavedValue
from residency._dtensor import moved
from residency._errors import warn


@dataclass(frozen=True, slots=True)
class SavedModule:
    """The part of a checkpoint that is a module, by names without what wrappers add.

    Attributes:
        names: The names of its tensors, with their names in the checkpoint.
        values: What is no tensor; called with a device, what was on one is there.
        metadata: The versions of its parts.
    """

    names: Mapping[str, str]
    values: Mapping[str, SavedValue] = field(default_factory=dict)
    metadata: SavedValue | None = None


def plan_module(plan: RestorePlan, module: nn.Module, saved: SavedModule, *, prefix: str) -> None:
    """Plans to fill a module's parameters and persistent buffers, and what the module itself does
    at a load, once all bytes are there.

    Args:
        plan: Gets the tensors, and every difference.
        module: Filled in place; wrappers around it are seen through.
        saved: What there is of it.
        prefix: What errors put before its names, such as ``"model."``.

    Memory:
        None for what is written in place. What the module's own ``load_state_dict`` takes is on the
        host once more, and on its device where it was there, until that returns.
    """
    module = plain_module(module)
    state = ModuleState(module)
    names = saved.names
    loading = _ComingModule(plan, module, state, saved)
    filled = {id(e.value) for n, e in state.entries.items() if n in names and _is_filled(e)}
    for name, entry in state.entries.items():
        if name not in names and name not in saved.values:
            # One name of a tied tensor is enough; many formats keep one only.
            if id(entry.value) not in filled:
                plan.missing.append(prefix + name)
        elif name in saved.values and _is_filled(entry):
            plan.differing.append(f"{prefix}{name}: saved a plain value, here a tensor")
        elif _is_filled(entry) and not _is_reshaped(plan, state, entry, names[name]):
            plan.fill(prefix + name, entry.value, names[name])
        else:
            loading.made[name] = entry
            if name not in saved.values:
                plan.make_fresh(names[name])
    there = (*names, *saved.values)
    plan.unexpected += [prefix + name for name in there if name not in state.entries]
    plan.after.append(loading.finish)


def _is_filled(entry: ModuleEntry) -> bool:
    return isinstance(entry.value, Tensor) and not entry.is_made


def _is_reshaped(plan: RestorePlan, state: ModuleState, entry: ModuleEntry, stored: str) -> bool:
    """Returns whether a tensor has another shape here, which its part changes when it is loaded."""
    shards = plan.source.tensors.get(stored)
    if not shards or tuple(shards[0].whole_shape) == tuple(entry.value.shape):
        return False
    return state.takes_other_shapes(entry)


@dataclass(slots=True)
class _ComingModule:
    """A module whose restore is planned.

    Attributes:
        made: What only its own ``load_state_dict`` takes, by name.
    """

    plan: RestorePlan
    module: nn.Module
    state: ModuleState
    saved: SavedModule
    made: dict[str, ModuleEntry] = field(default_factory=dict)

    def finish(self) -> None:
        """Calls the module's ``load_state_dict`` where there is something for it to do."""
        entries = self.state.entries
        if not (self.made or self.state.is_loaded):
            return
        values: OrderedDict[str, object] = OrderedDict()
        for name, entry in entries.items():
            if name in self.made:
                value = self._value_of(name, entry)
                if not (entry.is_made and self._is_left(name, entry, value)):
                    values[entry.raw] = value
            elif _is_filled(entry):
                values[entry.raw] = entry.value
        metadata = self.state.metadata
        if self.saved.metadata is not None:
            metadata = OrderedDict(self.saved.metadata())
        if metadata is not None:
            values._metadata = metadata  # type: ignore[attr-defined]  # as torch's state dict has
        if len(values) == len(entries):
            self.module.load_state_dict(values)
        else:
            self.module.load_state_dict(values, strict=False)

    def _value_of(self, name: str, entry: ModuleEntry) -> object:
        """Returns what was saved, on the device where it is here, or was."""
        saved = self.saved
        if name in saved.values:
            return saved.values[name](_device_of(self.module))
        value = self.plan.fresh[saved.names[name]]
        here = entry.value.device if isinstance(entry.value, Tensor) else _device_of(self.module)
        return value if here is None or not entry.is_made else moved(value, here)

    def _is_left(self, name: str, entry: ModuleEntry, value: object) -> bool:
        """Returns whether the module takes an entry from no state dict; warns of another value."""
        if self.state.is_taken(entry) or not self.state.is_of_a_parameter(entry):
            return False
        if not (isinstance(value, Tensor) and torch.equal(value, entry.value)):
            warn(
                f"{name} is another one here than was saved, and nothing in "
                f"{type(self.module).__name__}.load_state_dict takes it: it is left as it is.",
            )
        return True


def _device_of(module: nn.Module) -> torch.device | None:
    """Returns where a module is: with its tensors, where it says itself, or on the accelerator."""
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    found = getattr(module, "device", None)
    return found if isinstance(found, torch.device) else _device.accelerator()
