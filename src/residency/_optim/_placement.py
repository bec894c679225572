"""Puts the state of an optimizer where its parameters' device demands: into homes on the host for
an accelerator, or into a plain mapping where the parameters are on the host themselves.

Invariant, which ``tests/optim/test_moves.py`` tries to break: a placement that fails leaves the
optimizer's state as it was.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from residency import _pinned
from residency._dtensor import layout_of, local_of, wrapped_like, write_count
from residency._errors import RefusedError
from residency._optim._apart import repeated, require_own_mappings
from residency._optim._homes import Home, Homes
from residency._optim._loading import device_rule
from residency._optim._masters import MASTER, as_masters_state, check_masters, master_like
from residency._optim._offload_record import HostState, Offload
from residency._optim._overlap import Ahead
from residency._optim._plan import Member
from residency._optim._residents import Residents
from residency._optim._state import ParameterState
from residency._optim._states import State
from residency._optim._trial._borrowed import refuse_borrowed
from residency._optim._trial._first_step import Schema, StateSize
from residency._optim._validate import check_flags, device_of
from residency._optim._whole import done_whole
from residency._transfer import Move, Mover, is_away, moved_at_once, raw_bytes

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
    resident = _choose_resident(offload, optimizer)
    on_device = _values_on_device(offload, optimizer)
    announced = {
        m.parameter: _expected(offload, optimizer, m)
        for m in members_of(optimizer)
        if m.parameter not in resident
    }
    likes = [local_of(like) for expected in announced.values() for like in expected.values()]
    homes.arena.reserve([like.numel() * like.element_size() for like in likes])
    state = _moved_state(homes, resident, offload, optimizer, on_device, repeats)
    for parameter, expected in announced.items():
        inner = state.peek(parameter) or ()
        homes.reserve(parameter, {key: like for key, like in expected.items() if key not in inner})
    ahead = Ahead(homes) if offload.overlaps else None
    offload.host, offload.resident = HostState(homes, state, ahead), resident
    offload.forget_plan()
    optimizer.state = state


def follow_parameters(optimizer: Optimizer, offload: Offload) -> None:
    """Places the state anew when the parameters are on another device than it was placed for.

    Those that are parked count as where they were: they come back, and the homes are on the host.

    Raises:
        RefusedError: They are on several devices, or the host has no room; nothing has moved.
    """
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


def prime_state(optimizer: Optimizer, offload: Offload, homes: Homes, state: State) -> None:
    """Puts zeros where first steps would make state.

    Raises:
        RefusedError: The host has no room, or a first step cannot be foreseen.
    """
    schemas: dict[Tensor, Schema] = {}
    for member in members_of(optimizer):
        if state.peek(member.parameter) or not member.parameter.requires_grad:
            continue
        schema = offload.schema_of(optimizer, member)
        if schema is None:
            raise RefusedError(
                f"{offload.base.__name__} cannot be primed: its first step failed on tensors "
                "without bytes, so its state is not known before it. Nothing was changed; take a "
                "step, and load after it."
            )
        size = StateSize.of(schema.device.values()).num_bytes
        if member.parameter in offload.resident and not offload.resident.allow(
            member.parameter, size
        ):
            offload.resident.revoke(id(member.parameter))
        if member.parameter not in offload.resident:
            homes.reserve(member.parameter, schema.device)
        schemas[member.parameter] = schema
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
        return wrapped_like(torch.zeros_like(local_of(like), device=place), like)
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


def _device_keys(offload: Offload, optimizer: Optimizer, member: Member) -> set[str]:
    """Returns the keys of an existing state that steps need on the parameters' device.

    Where a scalar lives decides in which arithmetic it advances, so it stays where it is, unless
    the whole state is on the host because the parameter was when it was made: then it goes where a
    first step would make it.
    """
    values = _values(optimizer, member.parameter)
    tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
    on_device = {key for key, value in tensors.items() if not value.is_cpu}
    if on_device or not tensors:
        return on_device
    schema = offload.schema_of(optimizer, member)
    needs_device = device_rule(offload, schema, member.parameter)
    return {key for key, value in tensors.items() if needs_device(key, value)}


def _expected(offload: Offload, optimizer: Optimizer, member: Member) -> dict[str, Tensor]:
    """Returns what a parameter's state has, or what its first step will make, on the device."""
    values = _values(optimizer, member.parameter)
    if values:
        keys = _device_keys(offload, optimizer, member)
        found = {key: value for key, value in values.items() if key in keys}
        if offload.has_master(member.parameter):
            found = {k: as_masters_state(v, member.parameter) for k, v in found.items()}
            found.setdefault(MASTER, master_like(member.parameter))
        return found
    schema = offload.schema_of(optimizer, member) if member.parameter.requires_grad else None
    return {} if schema is None else schema.device


def _choose_resident(offload: Offload, optimizer: Optimizer) -> Residents:
    chosen = Residents(offload.resident_bytes)
    for member in members_of(optimizer) if offload.resident_bytes else ():
        # What cannot be foreseen cannot be promised to fit.
        is_known = bool(_values(optimizer, member.parameter)) or (
            offload.schema_of(optimizer, member) is not None
        )
        num_bytes = StateSize.of(_expected(offload, optimizer, member).values()).num_bytes
        if is_known:
            chosen.allow(member.parameter, num_bytes)
    return chosen


def _values_on_device(offload: Offload, optimizer: Optimizer) -> set[tuple[Tensor, object]]:
    """Returns what steps need on the device of the state that exists, by parameter and key."""
    return {
        (member.parameter, key)
        for member in members_of(optimizer)
        if _values(optimizer, member.parameter)
        for key in _device_keys(offload, optimizer, member)
    }


def _moved_state(
    homes: Homes,
    resident: Residents,
    offload: Offload,
    optimizer: Optimizer,
    on_device: Collection[tuple[Tensor, object]],
    repeats: Collection[tuple[Tensor, object]],
) -> State:
    """Builds the offloaded state, with copies home queued behind what the device does now.

    Args:
        homes: Where to.
        resident: The parameters whose state stays on the device.
        offload: Its settings.
        optimizer: Has the state.
        on_device: What steps need on the device, by parameter and key.
        repeats: Tensors that are another state, too, and come apart.
    """
    state = State.over(homes, resident)
    members = {m.parameter: m for m in members_of(optimizer)}
    mover = Mover(homes.device)
    for parameter, values in optimizer.state.items():
        if parameter not in members or not isinstance(values, dict):
            state[parameter] = values
            continue
        inner = state.of(parameter)
        inner.made_for = layout_of(parameter)
        moves: list[Move] = []
        has_master = offload.has_master(parameter)
        for key, saved in values.items():
            value = saved
            if has_master and isinstance(saved, Tensor):
                value = as_masters_state(saved, parameter)
            is_on_device = (parameter, key) in on_device
            if is_on_device and not inner.is_resident and value.device == homes.device:
                home = homes.allocate(value)
                inner.settle(key, home)
                moves.append((raw_bytes(home.tensor), raw_bytes(local_of(value))))
            elif isinstance(value, Tensor):
                inner.place(key, value, on_device=is_on_device, copy=(parameter, key) in repeats)
            else:
                dict.__setitem__(inner, key, value)
        if moves:
            mover.follow_to_host()
            sources = [source for _, source in moves]
            homes.newest = inner.written = mover.to_host(moves, sources).event
            mover.let_go(sources)
    return state
