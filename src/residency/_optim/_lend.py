"""Lends the state of an offloaded optimizer to a save, and keeps the steps meanwhile off it.

A save gets the homes themselves. A step that is to write into one that is lent takes another home
for it, out of a bounded spare; without room there it waits until a loan ends. Invariant, which
``tests/checkpoint/test_checkpointer.py`` tries to break: a lent state has the bytes of the moment
of its loan until the save gives it back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from residency._dtensor import local_of
from residency._nesting import half_done
from residency._optim._homes import Home
from residency._optim._offload_record import plain_schema_of, record_of
from residency._optim._offloaded import OffloadedOptimizer, offload_of
from residency._optim._placement import follow_caller
from residency._optim._receive import receive_state
from residency._optim._state import ParameterState
from residency._optim._trial._first_step import Schemas
from residency._transfer import (
    Incoming,
    Lent,
    Loans,
    Reception,
    lending,
    owned_optimizers,
    register_forecast,
    register_owner,
    state_stays,
)


class OffloadOwner:
    """The owner of an ``OffloadedOptimizer``'s state."""

    @half_done("a save")
    def lend(
        self, optimizer: Any, loans: Loans, *, is_lasting: bool = False, is_watched: bool = False
    ) -> Mapping[Any, Mapping[str, Any]]:
        """Returns the state by parameter and key, without a wait; see ``StateOwner``."""
        offload = offload_of(optimizer)
        follow_caller(optimizer, offload)
        states = dict(dict.items(optimizer.state))
        if offload.host is not None:
            offload.host.state.require_own_mappings("Nothing was saved")
            offload.host.homes.bring_home()
            homes = [h for s in states.values() for h in _homes_of(s)]
            if is_lasting:
                offload.host.homes.make_second_set([home.num_bytes for home in homes])
            offload.host.homes.make_spare([home.num_bytes for home in homes])
        return {
            key: _lent(inner, loans, is_lasting, is_watched)
            if isinstance(inner, ParameterState)
            else inner
            for key, inner in states.items()
        }

    def set_spare(self, optimizer: Any, num_bytes: int | None) -> None:
        """Sets and allocates what steps may take while states are lent; see ``StateOwner``."""
        host = offload_of(optimizer).host
        if host is None:
            return
        homes = host.homes
        sizes = [home.num_bytes for s in dict.values(optimizer.state) for home in _homes_of(s)]
        sizes += [h.num_bytes for made in homes.reserved.values() for h in made.values()]
        if num_bytes is not None:
            homes.spare_bytes = num_bytes
        homes.make_spare(sizes)

    def bring_home(self, optimizer: Any) -> None:
        """Gives back the memory of state that is on the device; see ``StateOwner``."""
        host = offload_of(optimizer).host
        if host is not None:
            host.homes.bring_home()

    def staying(self, optimizer: Any) -> Mapping[str, Tensor]:
        """Returns the states that stay on the device between steps; see ``StateOwner``."""
        return {
            f"state.{index}.{key}": value
            for index, inner in enumerate(dict.values(optimizer.state))
            for key, value in (inner.staying() if isinstance(inner, ParameterState) else {}).items()
        }

    def receive(
        self, optimizer: Any, states: Mapping[Tensor, Mapping[str, Incoming | None]]
    ) -> Reception | None:
        """Makes room in the homes for a saved state; see ``StateOwner``."""
        offload = offload_of(optimizer)
        follow_caller(optimizer, offload)
        return None if offload.host is None else receive_state(optimizer, offload, states)


@half_done("a save")
def lend_homes(
    addresses: Collection[int], loans: Loans, spare_bytes: int | None = None
) -> dict[int, Lent]:
    """Lends the homes that begin at these addresses, of whatever offloaded optimizer.

    Args:
        addresses: Of tensors that a caller wants to keep as they are; most may be anything else.
        loans: Who has borrowed them: all loans are among these.
        spare_bytes: As in ``set_spare``.

    Returns:
        The loans by address.

    Raises:
        RefusedError: The host has no room for what steps take meanwhile. Nothing is lent.
    """
    wanted = set(addresses) - {0}
    found: list[tuple[Home, ParameterState]] = []
    for optimizer in owned_optimizers():
        if not isinstance(optimizer, OffloadedOptimizer):
            continue
        offload = offload_of(optimizer)
        inners = [i for i in dict.values(optimizer.state) if isinstance(i, ParameterState)]
        mine = [(h, i) for i in inners for h in _homes_of(i) if h.tensor.data_ptr() in wanted]
        if mine:
            homes = offload.on_host.homes
            homes.bring_home()
            if spare_bytes is not None:
                homes.spare_bytes = spare_bytes
            homes.make_spare([home.num_bytes for home, _ in mine])
            found += mine
    return {
        home.tensor.data_ptr(): _loan(inner, home, loans, is_lasting=False, is_watched=True)
        for home, inner in found
    }


def _homes_of(values: object) -> list[Home]:
    return list(values.homes_by_key.values()) if isinstance(values, ParameterState) else []


def _lent(
    inner: ParameterState, loans: Loans, is_lasting: bool, is_watched: bool
) -> dict[str, object]:
    inner.require_in_place()
    if inner.template is not None and inner.is_template():
        return {}
    values: dict[str, Any] = {}
    for key, value in dict.items(inner):
        home = inner.homes_by_key.get(key)
        if home is None:
            values[key] = value
        else:
            values[key] = _loan(inner, home, loans, is_lasting, is_watched)
    return values


def _loan(
    inner: ParameterState, home: Home, loans: Loans, is_lasting: bool, is_watched: bool
) -> Lent:
    """Lends a home; for good, and where a caller has it, a copy: he goes on to write."""
    homes = inner.homes
    if is_lasting and (homes.has_views if is_watched else homes.is_held)(home):
        inner.fence()
        home = homes.copy_of(home)
    if is_lasting:
        home.is_watched = is_watched and (home.is_watched or not lending.is_lasting(home.tensor))
    num_writes = partial(homes.num_writes, home)
    lent = loans.lend(
        home.tensor, home.value, inner.written, is_lasting=is_lasting, num_writes=num_writes
    )
    lent.region = home.region
    if is_lasting and not is_watched:
        lent.own_bytes = partial(homes.own_bytes, home)
    return lent


@state_stays()
def _states_to_come(optimizer: Optimizer) -> list[Tensor]:
    """Returns what first steps will make and a save will copy; of an offloaded optimizer, that is
    what does not live in homes.
    """
    offload = record_of(optimizer)
    found: list[Tensor] = []
    schemas = Schemas()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if dict.get(optimizer.state, parameter) or not parameter.requires_grad:
                continue
            schema = plain_schema_of(optimizer, group, parameter, schemas)
            if schema is None:
                continue
            homes = {}
            if offload is not None and offload.host is not None:
                homes = {} if parameter in offload.resident else schema.device
            found += [
                local_of(value)
                for key, value in schema.values.items()
                if isinstance(value, Tensor) and key not in homes
            ]
    return found


register_owner(OffloadedOptimizer, OffloadOwner())
register_forecast(_states_to_come)
