"""Moves entries of the state that share bytes together: from the device home, and back.

Invariant, which ``tests/optim/test_ties.py`` tries to break: of entries that share bytes, all stay
on the device or none does, and a move of one moves the others, so that they share bytes in the new
place as they did in the old.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from residency._dtensor import is_sharded, local_of, wrapped_like
from residency._errors import RefusedError
from residency._optim._homes import Home, Homes, common_bytes
from residency._optim._masters import as_masters_state
from residency._optim._residents import Residents
from residency._storages import laid_over, overlapping, span_of, strided_as
from residency._transfer import copy_across, lending, moved_at_once

_Key = TypeVar("_Key", bound=Hashable)


def moved_together(
    values: Mapping[_Key, Tensor], device: torch.device, *, copy: bool
) -> dict[_Key, Tensor]:
    """Returns each value on the device, once it is there; what shares bytes shares them there too.

    Raises:
        RefusedError: No storage has all bytes of tensors that share some.

    Memory:
        Bytes that are shared are copied once, with those between them.
    """
    keys, local = list(values), [local_of(value).detach() for value in values.values()]
    groups = [group for group in overlapping(local) if copy or local[group[0]].device != device]
    wholes = [common_bytes([local[index] for index in group]) for group in groups]
    copies = moved_at_once(wholes, device, copy=True)
    tied = {index for group in groups for index in group}
    alone = [key for index, key in enumerate(keys) if index not in tied]
    arrived = moved_at_once([values[key] for key in alone], device, copy=copy)
    made = dict(zip(alone, arrived, strict=True))
    for group, whole, copied in zip(groups, wholes, copies, strict=True):
        for index in group:
            tensor = local[index]
            view = laid_over(copied, tensor.data_ptr() - whole.data_ptr(), tensor)
            made[keys[index]] = wrapped_like(view, values[keys[index]])
    return {key: made[key] for key in keys}


def stay_together(values: Mapping[tuple[Tensor, Any], Tensor], resident: Residents) -> bool:
    """Streams all parameters that share state if one of them is streamed.

    Args:
        values: What steps need on the device, by parameter and key.
        resident: Those that stay on the device.

    Returns:
        Whether any two values share bytes.
    """
    owners = [parameter for parameter, _ in values]
    groups = overlapping([local_of(value) for value in values.values()])
    is_done = False
    while not is_done:
        is_done = True
        for group in groups:
            staying = [owners[index] in resident for index in group]
            if any(staying) and not all(staying):
                is_done = False
                for index in group:
                    resident.revoke(id(owners[index]))
    return bool(groups)


def tied_among(
    values: Mapping[tuple[Tensor, Any], Tensor], has_master: Callable[[Tensor], bool]
) -> dict[tuple[Tensor, Any], Tensor]:
    """Returns those values that share bytes with others, in the dtype in which they are stepped.

    Args:
        values: State by parameter and key.
        has_master: Whether a parameter's state becomes that of a float32 master.

    Raises:
        RefusedError: Values that are not one tensor would be converted each by itself.
    """
    keys = list(values)
    tied: dict[tuple[Tensor, Any], Tensor] = {}
    for group in overlapping([local_of(value) for value in values.values()]):
        found = {keys[index]: values[keys[index]] for index in group}
        made = {
            key: as_masters_state(value, key[0]) if has_master(key[0]) else value
            for key, value in found.items()
        }
        if any(made[key] is not found[key] for key in found):
            positions = {_position(local_of(value)) for value in found.values()}
            if len(positions) > 1 or len({value.dtype for value in made.values()}) > 1:
                raise RefusedError(
                    f"states {sorted({str(key) for _, key in found})} share bytes, and those of "
                    "parameters with a master weight are converted to float32, each by itself. "
                    "Nothing was changed: give each of them a copy, or leave out master_weights."
                )
            made = dict.fromkeys(found, next(iter(made.values())))
        tied.update(made)
    return tied


def fill_together(homes: Homes, values: Sequence[Tensor]) -> dict[int, Home]:
    """Makes homes of those values that share bytes, by index, which share them as the values do.
    Those that lie in homes already do so by themselves, and are left out.

    Raises:
        RefusedError: The host has no room, or no storage has all bytes of such a group.
    """
    local = [local_of(value).detach() for value in values]
    made: dict[int, Home] = {}
    for group in overlapping(local):
        if any(homes.has(values[index]) for index in group):
            continue
        positions = {_position(local[index]) for index in group}
        if len(positions) == 1:
            one = homes.allocate(values[group[0]])
            homes.fence()  # the range may have belonged to a tensor that is still on its way home
            homes.write(one, values[group[0]])
            made.update(dict.fromkeys(group, one))
            continue
        copied = _copied_home(homes, [local[index] for index in group])
        home_of: dict[tuple[Any, ...], Home] = {}
        for index, tensor in zip(group, copied, strict=True):
            position = _position(tensor)
            if position not in home_of:
                home_of[position] = homes.over(wrapped_like(tensor, values[index]))
            made[index] = home_of[position]
    return made


def _position(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), *strided_as(tensor)


def _copied_home(homes: Homes, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies tensors whose ranges overlap into one range of host memory."""
    whole = common_bytes(tensors)
    # Aligned as it was, for the widest of the dtypes.
    start = whole.data_ptr() % torch.complex128.itemsize
    num_bytes = start + whole.numel()
    region = homes.arena.allocate(num_bytes)
    homes.fence()
    base = homes.arena.tensor(region, torch.uint8, (num_bytes,), (1,))
    copy_across(base[start:], whole)
    offset = start - whole.data_ptr()
    return [laid_over(base, offset + tensor.data_ptr(), tensor) for tensor in tensors]


def writable(homes: Homes, home: Home) -> Home:
    """Returns ``Homes.writable``; homes that share bytes with one that is kept for good all move.

    Raises:
        RefusedError: The host has no room for them.
    """
    if home.moved_to is not None:  # with one that was asked for before
        return writable(homes, home.moved_to)
    group = homes.beside(home)
    if not group:
        return homes.writable(home)
    tensors = [each.tensor for each in group]
    lending.wait_until(
        lambda: all(not lending.is_lent(t) or lending.is_lasting(t) for t in tensors)
    )
    if any(map(lending.is_lent, tensors)):
        for each, tensor in zip(group, _copied_home(homes, tensors), strict=True):
            each.move_to(homes.over(wrapped_like(tensor, each.value)))
    return home.moved_to or home


def move_entries(homes: Homes, moved: Mapping[Home, Home]) -> None:
    """Settles every entry of homes that others have taken the place of, whichever parameter's."""
    for inner in list(homes.mappings.values()):
        for key, home in list(inner.homes_by_key.items()):
            if home in moved:
                inner.settle(key, moved[home])
    homes.arrivals.move(moved)


def apart_from_snapshots(homes: Homes, home: Home) -> Home:
    """Returns the home of a state that a caller is about to see: where a snapshot keeps the bytes
    for good, the state gets a copy, so that what he sees is the state's and not the snapshot's. A
    save that watches its bytes is no reason for one.
    """
    if home.is_watched or not lending.is_lasting(home.tensor):
        return home
    another = writable(homes, home)
    if home.moved_to is None:
        homes.fence()  # the range may have belonged to a tensor that is still on its way home
        another.tensor.copy_(home.tensor)
    move_entries(homes, {home: another})
    return another


def own_bytes(homes: Homes, home: Home, span: Tensor) -> Tensor:
    """Returns the bytes of a home that is lent for good in memory that the borrower alone has: the
    home's own once the state has moved and other borrowers are done, else a copy in the room of
    ``Homes.make_second_set``. From any thread.

    Args:
        homes: Where it is.
        home: One that no caller has.
        span: Its bytes, final.

    Raises:
        RefusedError: Other copies have that room, and the host has no more.
    """
    # No step writes into a home that is lent, or returns to it.
    if not home.num_entries and lending.has_one_borrower(home.tensor):
        return span
    region = homes.arena.allocate(span.numel())
    homes.fence()  # the range may have belonged to a tensor that is still on its way home
    made = homes.arena.tensor(region, torch.uint8, span.shape, (1,))
    copy_across(made, span)
    lending.lend(made, object(), is_lasting=True)
    return made


def at_home(homes: Homes, value: Tensor) -> Tensor:
    """Returns what is at home of a tensor of the device; itself where no byte of it is."""
    state = arrived(homes, value)
    joined = joined_to_arrived(homes, value) if state is value else None
    return state if joined is None else joined


def arrived(homes: Homes, value: Tensor) -> Tensor:
    """Returns the state that a tensor of the device went to, or the part of it that a view is; the
    tensor itself where it went nowhere.
    """
    local = local_of(value)
    found = homes.arrivals.find(local)
    home = homes.follow(found[0]) if found is not None else None
    if found is None or home is None or not home.num_entries:
        return value
    if is_sharded(home.value) != is_sharded(value):
        return value
    shown = homes.show(home)
    if not found[1] and _position(local)[1:] == _position(home.tensor)[1:]:
        return shown
    return laid_over(common_bytes([local_of(shown)]), found[1], local)


def joined_to_arrived(homes: Homes, value: Tensor) -> Tensor | None:
    """Returns the home of a tensor of the device of which others have taken some bytes home: theirs
    and its own lie in one range from now on, as they do on the device.

    Returns:
        What is at home; None where no step or assignment took bytes of it home.

    Raises:
        RefusedError: The host has no room; nothing has moved.
    """
    local = local_of(value).detach()
    span = span_of(local)
    near = [(homes.follow(home), first) for home, first in homes.arrivals.beside(local)]
    start_of = {
        each: first + each.tensor.data_ptr() - home.tensor.data_ptr()
        for home, first in near
        if home.num_entries
        for each in homes.beside(home) or [home]
    }
    if span is None or not start_of:
        return None
    tensors = [home.tensor for home in start_of]
    lending.wait_until(
        lambda: all(not lending.is_lent(t) or lending.is_lasting(t) for t in tensors)
    )
    first = min(span.first, *start_of.values())
    first -= first % torch.complex128.itemsize  # aligned for the widest of the dtypes
    ends = [start + len(common_bytes([home.tensor])) for home, start in start_of.items()]
    num_bytes = max(span.last, *ends) - first
    region = homes.arena.allocate(num_bytes)
    homes.fence()
    base = homes.arena.tensor(region, torch.uint8, (num_bytes,), (1,))
    copy_across(base[span.first - first : span.last - first], common_bytes([local]))
    moved: dict[Home, Home] = {}
    for home, start in start_of.items():  # over the tensor's: steps have written to these
        view = laid_over(base, start - first, home.tensor)
        view.copy_(home.tensor)
        moved[home] = homes.over(wrapped_like(view, home.value))
        homes.show_instead(moved[home], home)
        home.move_to(moved[home])
    move_entries(homes, moved)
    mine = homes.over(wrapped_like(laid_over(base, span.first - first, local), value))
    homes.arrivals.note(local, mine)
    return homes.show(mine)


def send_home(homes: Homes, leaving: Any, beside: Tensor | None = None) -> Tensor | None:
    """Sends the values of a ``ParameterState`` that stay on the device home, with the states that
    share bytes with them; from now on they stream.

    Args:
        homes: Where to.
        leaving: The state; None for those that share bytes with ``beside``.
        beside: A tensor that is to be a state as well.

    Returns:
        What is ``beside`` at home; None where it shares no bytes with a state of the device.

    Raises:
        RefusedError: The host has no room; nothing has moved.
    """
    going = _going_with(homes, leaving, beside)
    if leaving is None and len(going) < 2:
        return None
    together = fill_together(homes, [each.value for each in going])
    went_to = [
        together[i] if i in together else homes.fill(each.reserved_home(), each.value)
        for i, each in enumerate(going)
    ]
    inners = {id(inner): inner for inner in (*(each.inner for each in going), leaving)}
    for inner in inners.values():
        if inner is not None:
            inner.leave_residents()
    for each, home in zip(going, went_to, strict=True):
        if each.inner is not None:
            each.inner.settle(each.key, home)
        homes.arrivals.note(local_of(each.value), home)
    return homes.show(went_to[-1]) if beside is not None else None


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A tensor that leaves the device for its home.

    Attributes:
        value: The tensor.
        inner: The ``ParameterState`` that has it; None of a tensor that is to be a state.
        key: The key there.
    """

    value: Tensor
    inner: Any = None
    key: Any = None

    @property
    def owner(self) -> int:
        """The identity of the one that it goes with."""
        return id(self.value if self.inner is None else self.inner)

    def reserved_home(self) -> Home | None:
        """Returns the home that waits for it."""
        return None if self.inner is None else self.inner.home_for(self.key)


def _going_with(homes: Homes, leaving: Any, beside: Tensor | None) -> list[_Leaving]:
    """Returns the entries that go home with a state, or with a tensor, which is the last then."""
    entries = [
        _Leaving(value, inner, key)
        for inner in list(homes.mappings.values())
        if inner is leaving or leaving is None or homes.has_aliases
        for key, value in dict.items(inner)
        if isinstance(value, Tensor) and not value.is_cpu
    ]
    if beside is not None:
        storages = {local_of(each.value).untyped_storage().data_ptr() for each in entries}
        if local_of(beside).untyped_storage().data_ptr() not in storages:
            return []  # as nearly always
        entries.append(_Leaving(beside))
    groups = overlapping([local_of(each.value) for each in entries])
    owners = {id(beside if leaving is None else leaving)}
    for group in _joined([[entries[i].owner for i in group] for group in groups]):
        owners |= group if owners & group else set()
    return [each for each in entries if each.owner in owners]


def _joined(groups: Sequence[Sequence[int]]) -> list[set[int]]:
    """Returns sets of which no two have a member in common."""
    joined: list[set[int]] = []
    for group in groups:
        members = set(group)
        apart = []
        for other in joined:
            if members & other:
                members |= other
            else:
                apart.append(other)
        joined = [*apart, members]
    return joined
