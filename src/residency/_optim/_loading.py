"""Loads a saved state into the homes, in two steps: everything that can fail, then the copies.

Invariant, which ``tests/optim/test_state.py`` tries to break: when the first step raises, the
optimizer is as it was before the load.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from residency._dtensor import layout_of, local_of
from residency._errors import RefusedError
from residency._optim._apart import repeated
from residency._optim._homes import Home, Homes
from residency._optim._masters import as_masters_state
from residency._optim._offload_record import Offload
from residency._optim._residents import Residents
from residency._optim._states import State
from residency._optim._trial._borrowed import refuse_borrowed
from residency._optim._trial._first_step import Schema, Schemas, planned_bytes
from residency._optim._trial._partial_step import PRIVATE, is_torchs_own
from residency._optim._validate import check_flags
from residency._transfer import moved_at_once


@dataclass(slots=True)
class Entry:
    """One value on its way in: with a home it is copied there, without it is kept as it is."""

    value: Any
    home: Home | None = None


@dataclass(slots=True)
class PreparedLoad:
    """Everything that a load needs, so that nothing is left that can fail.

    Attributes:
        groups: The groups after the load.
        attributes: What the class' own repair of old states replaced on the optimizer.
        resident: The parameters whose state stays on the device after the load.
        entries: By parameter and key, in the saved order; other keys of a state dict as they are.
    """

    groups: list[dict[str, Any]]
    attributes: dict[str, Any]
    resident: Residents
    entries: dict[Any, Any] = field(default_factory=dict)

    def finish(self, optimizer: Optimizer, state: State, homes: Homes) -> None:
        """Fills the homes and puts groups, attributes and state in place."""
        state.fence()
        homes.fence()  # a new home's range may have belonged to a copy under way
        state.residents.become(self.resident)
        optimizer.__dict__.update(self.attributes)
        optimizer.param_groups = self.groups
        for stale in [key for key in state if key not in self.entries]:
            del state[stale]
        for parameter, entries in self.entries.items():
            if not (isinstance(parameter, Tensor) and isinstance(entries, dict)):
                state[parameter] = entries
                continue
            inner = state.of(parameter)
            inner.reserved.clear()  # taken, or of no use for the dtypes that were loaded
            for key in [k for k in dict.keys(inner) if k not in entries]:
                inner.forget(key)
            for key, entry in entries.items():
                if entry.home is not None:
                    if entry.value is not entry.home.value:  # else it was read there
                        homes.write(entry.home, entry.value)
                    inner.settle(key, entry.home)
                else:
                    inner.put_as_is(key, entry.value)
            inner.reorder(list(entries))
            inner.made_for = layout_of(parameter)
            inner.template = None


def prepare_load(
    optimizer: Optimizer,
    offload: Offload,
    values: Mapping[object, object],
    others: Mapping[str, object],
) -> PreparedLoad:
    """Checks a saved state and makes room for it, without a change to the optimizer.

    Args:
        optimizer: An offloaded one.
        offload: What it knows.
        values: The saved state by parameter.
        others: What else is set on the optimizer, ``param_groups`` among it.

    Raises:
        RefusedError: A value cannot be kept in a home, or is something else, too; or the host has
            no room.
    """
    plain = {k: dict(v) if isinstance(v, dict) else v for k, v in values.items()}
    repaired = _repaired(optimizer, offload.base, {**others, "state": defaultdict(dict, plain)})
    attributes = {
        name: value
        for name, value in repaired.__dict__.items()
        if name not in ("state", "param_groups")
        and optimizer.__dict__.get(name, repaired) is not value
    }
    check_flags(offload.base.__name__, repaired.param_groups)
    offload.on_host.state.require_own_mappings("Nothing was loaded")
    refuse_borrowed(
        offload.base.__name__, repaired.param_groups, repaired.state, refused="load this"
    )
    prepared = PreparedLoad(repaired.param_groups, attributes, Residents(offload.resident_bytes))
    group_of = {p: group for group in repaired.param_groups for p in group["params"]}
    memo: dict[int, object] = {}
    schemas = Schemas()
    rules: dict[Tensor, Callable[[str, Tensor], bool]] = {}
    for parameter, saved in repaired.state.items():
        if not (isinstance(parameter, Tensor) and isinstance(saved, dict)):
            prepared.entries[parameter] = copy.deepcopy(saved, memo)
            continue
        group = group_of.get(parameter)
        schema = None
        if group is not None:
            schema = offload.schema_in(optimizer, group, parameter, schemas)
        if schema is not None and is_torchs_own(offload.base):
            check_shapes(schema, saved)
        rules[parameter] = device_rule(offload, schema, parameter)
        stay_here(offload, prepared.resident, parameter, saved, rules[parameter])
        prepared.entries[parameter] = {
            key: Entry(
                _checked(key, value) if isinstance(value, Tensor) else copy.deepcopy(value, memo)
            )
            for key, value in saved.items()
        }
    _place_tensors(offload, prepared, rules)
    return prepared


def _place_tensors(
    offload: Offload,
    prepared: PreparedLoad,
    rules: Mapping[Tensor, Callable[[str, Tensor], bool]],
) -> None:
    """Decides where each tensor of a saved state goes."""
    homes = offload.on_host.homes
    tensors = {
        (parameter, key): entry.value
        for parameter in rules
        for key, entry in prepared.entries[parameter].items()
        if isinstance(entry.value, Tensor)
    }
    repeated(tensors, "Nothing was loaded")
    here: dict[tuple[Tensor, str], Tensor] = {}
    on_host: dict[tuple[Tensor, str], Tensor] = {}
    for (parameter, key), saved in tensors.items():
        if not rules[parameter](key, saved) and not homes.has(saved):
            on_host[parameter, key] = saved
            continue
        value = as_masters_state(saved, parameter) if offload.has_master(parameter) else saved
        if parameter in prepared.resident:
            here[parameter, key] = value
        else:
            home = homes.chosen_for(offload.on_host.home_for(parameter, key), value)
            prepared.entries[parameter][key] = Entry(value, home)
    # Copies: the step advances them in place, and the saved ones are not ours.
    for moving, device in ((here, homes.device), (on_host, torch.device("cpu"))):
        arrived = moved_at_once(list(moving.values()), device, copy=True)
        for (parameter, key), value in zip(moving, arrived, strict=True):
            prepared.entries[parameter][key] = Entry(value)


def _repaired(
    optimizer: Optimizer, base: type[Optimizer], saved: Mapping[str, object]
) -> Optimizer:
    """Returns an instance with the saved state on which the class has run its own repairs of old
    states (``__setstate__``), so that a saved state that it cannot repair changes nothing.
    """
    made = object.__new__(base)
    hidden = ("step", "state", "param_groups", PRIVATE)
    made.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k not in hidden})
    made.param_groups = optimizer.param_groups
    made.__setstate__(dict(saved))
    return made


def check_shapes(schema: Schema, saved: Mapping[str, object]) -> None:
    """Refuses saved states of other shapes than a first step makes."""
    for key, expected in schema.device.items():
        value = saved.get(key)
        if isinstance(value, Tensor) and local_of(value).shape != local_of(expected).shape:
            raise RefusedError(
                f"the saved state {key!r} has the shape {tuple(local_of(value).shape)}, and its "
                f"parameter's is {tuple(local_of(expected).shape)} here (of a sharded one, the "
                "local shape). Nothing was loaded; load it into the optimizer of the saved model."
            )


def device_rule(
    offload: Offload, schema: Schema | None, parameter: Tensor
) -> Callable[[str, Tensor], bool]:
    """Returns the rule that says which values go where steps see them on the device.

    Where a scalar lives decides in which arithmetic it advances. Torch's own loading puts NAdam's
    ``mu_product`` on the device and ASGD's ``step`` on the host, unlike their first steps, and a
    run resumed there ends at other bits than an uninterrupted one.
    An assignment knows the value alone (``ParameterState``), a plain optimizer's restore no schema:
    ``tests/optim/test_where_states_live.py`` compares the three.

    Source: ``_init_group`` of each class; ``Optimizer._process_value_according_to_param_policy``.
    """
    inner = offload.host.state.peek(parameter) if offload.host is not None else None

    def needs_device(key: str, value: Tensor) -> bool:
        if schema is not None and key not in schema.unseen:
            made = schema.values.get(key)
            is_of_host = isinstance(made, Tensor) and made.is_cpu
            return key in schema.device or (value.dim() > 0 and not is_of_host)
        if inner is not None and isinstance(dict.get(inner, key), Tensor):
            return inner.is_on_device(key)
        return value.dim() > 0 or (parameter.dim() == 0 and key != "step")

    return needs_device


def stay_here(
    offload: Offload,
    resident: Residents,
    parameter: Tensor,
    values: Mapping[str, object],
    needs_device: Callable[[str, Tensor], bool],
) -> None:
    """Adds a parameter to those that are to stay on the device after a load, where its state did
    so far and the budget has room for the one that comes.
    """
    if parameter not in offload.resident:
        return
    tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
    if offload.has_master(parameter):
        tensors = {key: as_masters_state(v, parameter) for key, v in tensors.items()}
    staying = [value for key, value in tensors.items() if needs_device(key, value)]
    resident.allow(parameter, sum(planned_bytes(value) for value in staying))


def _checked(key: str, value: Tensor) -> Tensor:
    if value.layout is not torch.strided or value.is_meta:
        raise RefusedError(
            f"the saved state {key!r} is a tensor on {value.device} of layout {value.layout}; "
            "expected dense values. Nothing was loaded."
        )
    return value.detach()
