"""Puts the state of an optimizer where its parameters' device demands: into homes on the host for
an accelerator, or into a plain mapping where the parameters are on the host themselves.

Invariant, which ``tests/optim/test_moves.py`` tries to break: a placement that fails leaves the
optimizer's state as it was.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from residency import _pinned
from residency._dtensor import layout_of, local_of, remade, write_count
from residency._errors import RefusedError
from residency._optim._apart import repeated, require_own_mappings
from residency._optim._homes import Home, Homes
from residency._optim._masters import check_masters
from residency._optim._offload_record import HostState, Offload
from residency._optim._overlap import Ahead
from residency._optim._places import Residents, StatePlace
from residency._optim._plan import Member
from residency._optim._state import ParameterState
from residency._optim._states import State
from residency._optim._trial._borrowed import refuse_borrowed
from residency._optim._trial._first_step import Schema
from residency._optim._trial._partial_step import is_torchs_own
from residency._optim._validate import check_flags, device_of
from residency._transfer import Move, Mover, is_away, moved_at_once, raw_bytes
from residency._whole import done_whole

_SPARE_BUCKETS = 2
_Values = Mapping[str, Any]


def members_of(optimizer: Optimizer) -> list[Member]:
    """Returns all parameters with the indices of their groups."""
    return [
        Member(index, parameter)
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    ]


def place_state(optimizer: Optimizer, offload: Offload, device: torch.device) -> None:
    """Places the state for parameters on ``device``.

    Args:
        optimizer: Has its state in a plain mapping, on whatever devices.
        offload: Gets homes and a state, or loses those it had.
        device: Where all parameters are.

    Raises:
        RefusedError: The host has no room for the homes, a state is something else, too, or states
            share a part of their bytes; nothing has moved.
    """
    if device.type == "cpu":
        check_masters(offload.base.__name__, offload.master_weights, device, ())
        optimizer.state = plain_state(optimizer.state, device)
        offload.host, offload.resident = None, Residents()
        offload.forget_plan()
        return
    refuse_borrowed(offload.base.__name__, optimizer.param_groups, optimizer.state)
    states = [_values(optimizer, member.parameter) for member in members_of(optimizer)]
    require_own_mappings(states, "Nothing was moved")
    repeats = repeated(_tensors_of(optimizer), "Nothing was moved")
    homes = Homes(device, pin=offload.pin, spare_bytes=_SPARE_BUCKETS * offload.most_in_bucket)
    residents = Residents(offload.resident_bytes)
    foreseen = {
        m.parameter: _foreseen(offload, optimizer, m, residents) for m in members_of(optimizer)
    }
    announced = {p: likes for p, (_, likes) in foreseen.items() if p not in residents}
    likes = [local_of(like) for expected in announced.values() for like in expected.values()]
    homes.arena.reserve([like.numel() * like.element_size() for like in likes])
    places = {parameter: each for parameter, (each, _) in foreseen.items()}
    state = _moved_state(homes, residents, offload, optimizer, places, repeats)
    for parameter, expected in announced.items():
        inner = state.peek(parameter) or ()
        homes.reserve(parameter, {key: like for key, like in expected.items() if key not in inner})
    ahead = Ahead(homes, keeps=offload.keeps) if offload.overlaps else None
    offload.host, offload.resident = HostState(homes, state, ahead), residents
    offload.forget_plan()
    if not is_torchs_own(offload.base):
        offload.forget_schemas()  # its attributes, which a caller may change, may decide states
    optimizer.state = state


def adopt_foreign_state(optimizer: Optimizer, offload: Offload) -> None:
    """Takes over a mapping that a caller put at ``optimizer.state``, such as an empty one."""
    foreign = optimizer.state
    if offload.host is None or foreign is offload.host.state:
        return
    state = offload.host.state
    for stale in [k for k in state if k not in foreign]:
        del state[stale]
    state.update(foreign)
    optimizer.state = state


def follow_caller(optimizer: Optimizer, offload: Offload) -> None:
    """Takes over what a caller put at ``optimizer.state``, and places the state anew when the
    parameters are on another device than it was placed for.

    Those that are parked count as where they were: they come back, and the homes are on the host.

    Raises:
        RefusedError: They are on several devices, or the host has no room; nothing has moved.
    """
    adopt_foreign_state(optimizer, offload)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    placed_for = torch.device("cpu") if offload.host is None else offload.host.homes.device
    if offload.host is not None and {placed_for.index} == set(map(Tensor.get_device, parameters)):
        return  # as nearly always; of what is no accelerator's the index is negative
    if all(p.device == placed_for or is_away(p) for p in parameters):
        return
    device = device_of(type(optimizer).__name__, parameters)
    if device.type != "cpu":
        check_flags(type(optimizer).__name__, optimizer.param_groups)
    before = optimizer.state
    pinned_bytes = 0 if offload.host is None else offload.host.homes.arena.pinned_bytes
    try:
        if offload.host is not None:
            # Homes are host tensors already; what stays on the old device is moved once, here.
            optimizer.state = plain_state(offload.host.state, torch.device("cpu"))
        place_state(optimizer, offload, device)
    except BaseException:
        optimizer.state = before
        raise
    del before  # the old homes go with it
    _pinned.give_back_pinned(pinned_bytes)


def prime_state(optimizer: Optimizer, offload: Offload) -> None:
    """Puts zeros where first steps would make state.

    Raises:
        RefusedError: The host has no room, or a first step cannot be foreseen.
    """
    homes, state = offload.on_host.homes, offload.on_host.state
    schemas: dict[Tensor, Schema] = {}
    members = [m for m in members_of(optimizer) if m.parameter.requires_grad]
    members = [m for m in members if not state.peek(m.parameter)]
    for member in members:
        schema = offload.schema_of(optimizer, member)
        if schema is None:
            raise RefusedError(
                f"{offload.base.__name__} cannot be primed: its first step failed on tensors "
                "without bytes, so its state is not known before it. Nothing was changed; take a "
                "step, and load after it."
            )
        schemas[member.parameter] = schema
    offload.ask_budget(optimizer, members)
    for parameter, schema in schemas.items():
        if parameter not in offload.resident:
            homes.reserve(parameter, schema.device)
    homes.fence()
    made: dict[Tensor, dict[str, Any]] = {}
    for parameter, schema in schemas.items():
        reserved = homes.reserved_for(parameter)
        made[parameter] = {
            key: reserved.get(key) if key in schema.device else None for key in schema.values
        }
        for key, home in made[parameter].items():
            if home is not None:
                home.tensor.zero_()
            else:
                like = schema.values[key]
                made[parameter][key] = _zero_of(like, key in schema.device, homes.device)
    done_whole(lambda: _show_templates(state, made))


def _show_templates(state: State, made: Mapping[Tensor, Mapping[str, object]]) -> None:
    for parameter, values in made.items():
        inner = state.of(parameter)
        for key, value in values.items():
            if isinstance(value, Home):
                inner.settle(key, value)
            else:
                inner.put_as_is(key, value)
        inner.template = {
            key: write_count(value) for key, value in dict.items(inner) if isinstance(value, Tensor)
        }


def _zero_of(like: object, is_on_device: bool, device: torch.device) -> object:
    if isinstance(like, Tensor):
        place = device if is_on_device else torch.device("cpu")
        return remade(like, partial(torch.zeros_like, device=place))
    is_number = isinstance(like, int | float) and not isinstance(like, bool)
    return type(like)() if is_number else copy.deepcopy(like)


def plain_state(state: Mapping[Any, Any], device: torch.device) -> defaultdict[Any, Any]:
    """Returns a state as a plain mapping, for parameters on ``device``.

    What steps need on the device goes there; what they keep on the host is as it was.
    """
    plain: defaultdict[Any, Any] = defaultdict(dict)
    at_home: dict[tuple[Any, Any], Tensor] = {}
    elsewhere: dict[tuple[Any, Any], Tensor] = {}
    for parameter, values in state.items():
        if not (isinstance(parameter, Tensor) and isinstance(values, dict)):
            plain[parameter] = values
            continue
        homes = values.homes_by_key if isinstance(values, ParameterState) else {}
        plain[parameter] = dict(values)
        for key, value in plain[parameter].items():
            if isinstance(value, Tensor) and (key in homes or not value.is_cpu):
                (at_home if key in homes else elsewhere)[parameter, key] = value
    # A home is copied even to the host, where its page-locked memory would stay in use.
    for moving, is_copied in ((at_home, True), (elsewhere, False)):
        arrived = moved_at_once(list(moving.values()), device, copy=is_copied)
        for (parameter, key), value in zip(moving, arrived, strict=True):
            plain[parameter][key] = value
    return plain


def _values(optimizer: Optimizer, parameter: Tensor) -> _Values:
    values = dict.get(optimizer.state, parameter)
    return values if isinstance(values, dict) else {}


def _tensors_of(optimizer: Optimizer) -> dict[tuple[Tensor, str], Tensor]:
    """Returns the tensors of the state, by parameter and key."""
    return {
        (member.parameter, key): value
        for member in members_of(optimizer)
        for key, value in _values(optimizer, member.parameter).items()
        if isinstance(value, Tensor) and local_of(value).layout is torch.strided
    }


def _foreseen(
    offload: Offload, optimizer: Optimizer, member: Member, residents: Residents
) -> tuple[dict[str, StatePlace], dict[str, Tensor]]:
    """Returns the places of a parameter's state, and what it has or its first step will make on the
    device.
    """
    parameter = member.parameter
    values = _values(optimizer, parameter)
    is_here = any(isinstance(value, Tensor) and not value.is_cpu for value in values.values())
    schema = None
    if not is_here and (values or parameter.requires_grad):
        schema = offload.schema_of(optimizer, member)
    if values:
        places = offload.places_of(parameter, values, schema, residents, is_arranged=True)
        here = {key: values[key] for key, place in places.items() if place is not StatePlace.HOST}
        return places, offload.kept(parameter, here)
    if schema is None:  # what cannot be foreseen cannot be promised to fit
        return {}, {}
    if offload.resident_bytes:
        residents.allow(id(parameter), (*schema.device.values(), *schema.later.values()))
    return {}, schema.device


def _moved_state(
    homes: Homes,
    residents: Residents,
    offload: Offload,
    optimizer: Optimizer,
    places: Mapping[Any, Mapping[str, StatePlace]],
    repeats: Collection[tuple[Tensor, object]],
) -> State:
    """Builds the offloaded state, with copies home queued behind what the device does now.

    Args:
        homes: Where to.
        residents: The parameters whose state stays on the device.
        offload: Its settings.
        optimizer: Has the state.
        places: Those of each parameter's state, by key.
        repeats: Tensors that are another state, too, and come apart.
    """
    state = State.over(homes, residents)
    mover = Mover(homes.device)
    for parameter, values in optimizer.state.items():
        if parameter not in places or not isinstance(values, dict):
            state[parameter] = values
            continue
        inner = state.of(parameter)
        inner.made_for = layout_of(parameter)
        moves: list[Move] = []
        for key, saved in values.items():
            place = places[parameter].get(key)
            if place is None:
                dict.__setitem__(inner, key, saved)
                continue
            value = offload.as_kept(saved, parameter)
            if place is StatePlace.HOME and value.device == homes.device:
                home = homes.allocate(value)
                inner.settle(key, home)
                moves.append((raw_bytes(home.tensor), raw_bytes(local_of(value))))
            else:
                inner.put(key, value, place, copy=(parameter, key) in repeats)
        if moves:
            mover.follow_to_host()
            sources = [source for _, source in moves]
            homes.newest = inner.written = mover.to_host(moves, sources).event
            mover.let_go(sources)
    return state
