"""Makes room for a saved state in the homes, into which a restore then reads it without a copy.

Invariant, which ``tests/checkpoint/restore/test_interrupted.py`` tries to break: until ``finish``
the mappings that callers see are as they were; of the homes that they show, the bytes are those of
the save as soon as it has been read.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from residency._dtensor import layout_of, local_of, moved, remade
from residency._errors import RefusedError
from residency._optim._homes import Home
from residency._optim._loading import Entry, PreparedLoad, saved_schema
from residency._optim._masters import MASTER
from residency._optim._offload_record import Offload
from residency._optim._places import Residents, StatePlace
from residency._optim._trial._first_step import Schema
from residency._storages import strided_as
from residency._transfer import Incoming


@dataclass(slots=True)
class Received:
    """The place for a saved state; see ``Reception``."""

    optimizer: Optimizer
    offload: Offload
    states: Mapping[Tensor, Mapping[str, Incoming | None]]
    resident: Residents
    targets: dict[tuple[Tensor, str], Tensor] = field(default_factory=dict)
    homes: dict[tuple[Tensor, str], Home] = field(default_factory=dict)
    staying: set[tuple[Tensor, str]] = field(default_factory=set)  # on the device

    def finish(
        self, values: Mapping[tuple[Tensor, str], object], by_other_key: Mapping[object, object]
    ) -> None:
        """Makes the homes that were filled the optimizer's state; see ``Reception``."""
        prepared = PreparedLoad(self.optimizer.param_groups, {}, self.resident, dict(by_other_key))
        for parameter, entries in self.states.items():
            prepared.entries[parameter] = {
                key: self._entry(parameter, key, values) for key in entries
            }
        prepared.finish(self.optimizer, self.offload)

    def _entry(
        self, parameter: Tensor, key: str, values: Mapping[tuple[Tensor, str], object]
    ) -> object:
        found = self.targets.get((parameter, key))
        if found is None:
            return Entry(values[parameter, key])
        found = self.offload.as_kept(found, parameter)
        if (parameter, key) in self.staying:
            found = moved(found, self.offload.on_host.homes.device)
        return Entry(found, self.homes.get((parameter, key)))


def receive_state(
    optimizer: Optimizer,
    offload: Offload,
    states: Mapping[Tensor, Mapping[str, Incoming | None]],
) -> Received:
    """Makes room for a saved state; see ``StateOwner.receive``.

    Memory:
        What fits the homes there are is read into them. Host memory for the rest; for states that
        stay resident and are there already none, else their bytes on the device.
    """
    offload.on_host.state.require_own_mappings("Nothing was changed")
    offload.on_host.homes.fence()  # what is read into must have no copy under way
    received = Received(optimizer, offload, states, Residents(offload.resident_bytes))
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    meta = torch.device("meta")
    known: dict[Hashable, tuple[Schema | None, dict[str, Tensor]]] = {}
    for parameter, entries in states.items():
        group = group_of[parameter]
        # Parameters of one group that are alike, with states that are alike: asked of one of them.
        kind = id(group), layout_of(parameter), local_of(parameter).stride(), *entries.items()
        if kind not in known:
            likes = {k: each.like(parameter, meta) for k, each in entries.items() if each}
            if MASTER in likes and not offload.has_master(parameter):
                raise RefusedError(
                    "the saved optimizer has float32 master weights, and this one steps the "
                    "rounded parameters. Nothing was changed: offload it with master_weights=True."
                )
            schema = saved_schema(optimizer, offload, group, parameter, likes)
            known[kind] = schema, likes
        schema, likes = known[kind]
        places = offload.places_of(parameter, likes, schema, received.resident)
        for key, like in likes.items():
            target = _target_for(received, parameter, key, like, places[key])
            received.targets[parameter, key] = target
    return received


def _target_for(
    received: Received, parameter: Tensor, key: str, like: Tensor, place: StatePlace
) -> Tensor:
    """Returns the tensor that a state's bytes are read into."""
    offload = received.offload
    wanted, host = offload.as_kept(like, parameter), torch.device("cpu")
    if place is StatePlace.HOST:
        return _empty(like, host)
    if place is StatePlace.DEVICE:
        received.staying.add((parameter, key))
        inner = offload.on_host.state.peek(parameter)
        there = dict.get(inner, key) if inner is not None else None
        if (
            isinstance(there, Tensor)
            and not there.is_cpu
            and strided_as(local_of(there)) == strided_as(local_of(like))
        ):
            return there
        return _empty(like, offload.on_host.homes.device if wanted.dtype == like.dtype else host)
    own = offload.on_host.home_for(parameter, key)
    home = offload.on_host.homes.home_to_fill(own, wanted)
    received.homes[parameter, key] = home
    # What is of another dtype than its master needs is read beside its home, and converted.
    return home.value if wanted.dtype == like.dtype else _empty(like, host)


def _empty(like: Tensor, device: torch.device) -> Tensor:
    def made(local: Tensor) -> Tensor:
        return torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device=device)

    return remade(like, made)
