"""Loads a saved state into the homes, in two steps: everything that can fail, then the copies.

Invariant, which ``tests/optim/test_state.py`` tries to break: when the first step raises, the
optimizer is as it was before the load.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from residency._dtensor import layout_of, local_of
from residency._errors import RefusedError
from residency._optim._apart import repeated
from residency._optim._homes import Home, Homes
from residency._optim._offload_record import Offload
from residency._optim._places import Residents, StatePlace
from residency._optim._states import State
from residency._optim._trial._borrowed import refuse_borrowed
from residency._optim._trial._first_step import Schema, Schemas
from residency._optim._trial._partial_step import PRIVATE, is_torchs_own
from residency._optim._validate import check_flags
from residency._transfer import moved_at_once
from residency._whole import done_whole


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

    def finish(self, optimizer: Optimizer, offload: Offload) -> None:
        """Fills the homes and puts groups, attributes and state in place, whole."""
        done_whole(lambda: self._finish(optimizer, offload.on_host.state, offload.on_host.homes))
        offload.forget_plan()
        offload.forget_schemas()

    def _finish(self, optimizer: Optimizer, state: State, homes: Homes) -> None:
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
    places: dict[Tensor, dict[str, StatePlace]] = {}
    for parameter, saved in repaired.state.items():
        if not (isinstance(parameter, Tensor) and isinstance(saved, dict)):
            prepared.entries[parameter] = copy.deepcopy(saved, memo)
            continue
        group = group_of.get(parameter)
        schema = None
        if group is not None:
            schema = saved_schema(optimizer, offload, group, parameter, saved, schemas)
        prepared.entries[parameter] = {
            key: Entry(
                _checked(key, value) if isinstance(value, Tensor) else copy.deepcopy(value, memo)
            )
            for key, value in saved.items()
        }
        places[parameter] = offload.places_of(parameter, saved, schema, prepared.resident)
    _put_in_place(offload, prepared.entries, places)
    return prepared


def _put_in_place(
    offload: Offload, entries: dict[Any, Any], places: Mapping[Tensor, Mapping[str, StatePlace]]
) -> None:
    """Finds the home of each tensor that is to have one, and copies the others."""
    homes = offload.on_host.homes
    tensors = {(p, key): entries[p][key].value for p, by_key in places.items() for key in by_key}
    repeated(tensors, "Nothing was loaded")
    here: dict[tuple[Tensor, str], Tensor] = {}
    on_host: dict[tuple[Tensor, str], Tensor] = {}
    for (parameter, key), saved in tensors.items():
        place = places[parameter][key]
        if place is StatePlace.HOST:
            on_host[parameter, key] = saved
            continue
        value = offload.as_kept(saved, parameter)
        if place is StatePlace.DEVICE:
            here[parameter, key] = value
        else:
            home = homes.chosen_for(offload.on_host.home_for(parameter, key), value)
            entries[parameter][key] = Entry(value, home)
    # Copies: the step advances them in place, and the saved ones are not ours.
    for moving, device in ((here, homes.device), (on_host, torch.device("cpu"))):
        arrived = moved_at_once(list(moving.values()), device, copy=True)
        for (parameter, key), value in zip(moving, arrived, strict=True):
            entries[parameter][key] = Entry(value)


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


def saved_schema(
    optimizer: Optimizer,
    offload: Offload,
    group: dict[str, Any],
    parameter: Tensor,
    saved: Mapping[str, object],
    known: Schemas | None = None,
) -> Schema | None:
    """Returns what a first step makes for a parameter, which a saved state is to be like.

    Raises:
        RefusedError: It has other shapes.
    """
    schema = offload.schema_in(optimizer, group, parameter, known)
    made = schema.device if schema is not None and is_torchs_own(offload.base) else {}
    for key, expected in made.items():
        value = saved.get(key)
        if isinstance(value, Tensor) and local_of(value).shape != local_of(expected).shape:
            raise RefusedError(
                f"the saved state {key!r} has the shape {tuple(local_of(value).shape)}, and its "
                f"parameter's is {tuple(local_of(expected).shape)} here (of a sharded one, the "
                "local shape). Nothing was loaded; load it into the optimizer of the saved model."
            )
    return schema


def _checked(key: str, value: Tensor) -> Tensor:
    if value.layout is not torch.strided or value.is_meta:
        raise RefusedError(
            f"the saved state {key!r} is a tensor on {value.device} of layout {value.layout}; "
            "expected dense values. Nothing was loaded."
        )
    return value.detach()
