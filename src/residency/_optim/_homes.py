"""Where the state of an offloaded optimizer lives: a tensor of host memory for each state.

Invariant, which ``tests/optim/test_kept_states.py`` tries to break: bytes go into a home only
through ``Homes.fill``, a copy home of the step, or a restore, and never while a save reads them.

[Note: what callers hold] A caller who reads a state gets a tensor over its home's bytes with a
storage of its own, the shown one. It is the live state, as without an offload: the caller may keep
it and views of it, read and write them. So a step that finds one alive, at its begin or its end,
waits for its copies home before it returns; a step without one does not wait. Assignments give
the value and tie nothing: a shown tensor whose home has no entry any more takes it along, and one
whose home has an entry is copied. A home that a caller holds is never filled with another's bytes.
A shown tensor that a caller puts over other memory (``.data =``, ``set_``, ``share_memory_``) is
refused, as the state cannot follow it.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor

from residency._dtensor import is_sharded, local_of, wrapped_like, write_count
from residency._modes import callers_modes_off
from residency._optim._apart import refuse_replaced
from residency._storages import is_dense, strided_as
from residency._transfer import (
    Region,
    SlabArena,
    align_up,
    another_over,
    copy_across,
    is_only_one,
    lending,
)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Home:
    """The place of one state tensor.

    Attributes:
        tensor: The bytes; of a sharded state, the local tensor.
        region: The range under them.
        value: The tensor, or a ``DTensor`` around it.
        has_entry: Whether a key of the state has it.
        views: References that live as long as a caller holds the shown tensor, or a view of it.
        num_writes: How often callers wrote to tensors that they were shown and let go of.
        is_watched: Whether a save that keeps the bytes for good finds out when callers write.
    """

    tensor: Tensor
    region: Region
    value: Tensor
    has_entry: bool = False
    views: list[weakref.ref[Any]] = field(default_factory=list)
    num_writes: int = 0
    is_watched: bool = False

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


class StateAhead(Protocol):
    """An ``Ahead`` as homes see it; see ``_overlap``."""

    def bring_home(self) -> None:
        """Queues the copies home of all that is newer there, and gives its memory back."""


class Homes:
    """The homes of one optimizer: makes and fills them.

    Attributes:
        device: The accelerator that the parameters are on.
        version: Changes whenever a home appears, moves or goes; plans are made for one version.
        newest: The event after the newest copy home, of whatever parameter.
        reserved: Homes for state that is not made yet, by the parameter's ``id`` and by key.
        spare_bytes: Room for states that are written while a save reads their homes.
        ahead: State that is on the device between steps, and may be newer than its home; None
            without overlap.
    """

    def __init__(self, device: torch.device, *, pin: bool = True, spare_bytes: int = 0) -> None:
        self.device = device
        self.arena = SlabArena(pin=pin)
        self.version = 0
        self.newest: torch.Event | None = None
        self.ahead: weakref.ref[StateAhead] | None = None
        self.spare_bytes = spare_bytes
        self._num_spare_bytes_made = 0
        # By id: a parameter that is replaced must not live on here. Another at its address takes
        # over homes only where they fit.
        self.reserved: dict[int, dict[str, Home]] = {}
        self._shown: dict[Home, Tensor] = {}
        self._held_views: weakref.WeakSet[Home] = weakref.WeakSet()
        self._by_address: weakref.WeakValueDictionary[int, Home] = weakref.WeakValueDictionary()

    def allocate(
        self, like: Tensor, shape: torch.Size | None = None, *, shard_of: Tensor | None = None
    ) -> Home:
        """Makes an unfilled home for a tensor like this one.

        Args:
            like: Gives the dtype, what callers see and, unless ``shape`` is given, the shape and
                (dense) strides.
            shape: A contiguous shape instead.
            shard_of: The parameter whose mesh and placements callers see, instead of those of
                ``like``.
        """
        self.version += 1
        model = _model_of(like, shape)
        num_bytes = model.numel() * model.element_size()
        region = self.arena.allocate(num_bytes)
        return self._home_in(region, model, like if shard_of is None else shard_of)

    def make_spare(self, sizes: Sequence[int]) -> None:
        """Allocates the spare, once: as much as it may be, or as these entries take if less.

        Raises:
            RefusedError: The host has no room.
        """
        wanted = min(self.spare_bytes, sum(align_up(max(size, 1)) for size in sizes))
        if wanted > self._num_spare_bytes_made:
            self.arena.reserve([wanted - self._num_spare_bytes_made])
            self._num_spare_bytes_made = wanted
            self.arena.is_reused = True

    def make_second_set(self, sizes: Sequence[int]) -> None:
        """Makes room for all states to move, beside the spare: a snapshot may keep the homes there
        are. Once it has let go of them they are room for the next one.

        Raises:
            RefusedError: The host has no room.
        """
        self.arena.make_room(
            [*sizes, *[self._num_spare_bytes_made] * bool(self._num_spare_bytes_made)]
        )
        self.arena.is_reused = True

    def apart_from_snapshots(self, home: Home) -> Home:
        """Returns the home of a state that a caller is about to see: where a snapshot keeps the
        bytes for good, another one with a copy, so that what he sees is not the snapshot's. A save
        that watches its bytes is no reason for one.
        """
        if home.is_watched or not lending.is_lasting(home.tensor):
            return home
        another = self.writable(home)
        self.land()  # the range may have belonged to a tensor that is still on its way home
        another.tensor.copy_(home.tensor)
        return another

    def own_bytes(self, home: Home, span: Tensor) -> Tensor:
        """Returns the bytes of a home that is lent for good in memory that the borrower alone has:
        the home's own once the state has moved and other borrowers are done, else a copy in the
        room of ``make_second_set``. From any thread.

        Args:
            home: One that no caller has.
            span: Its bytes, final.

        Raises:
            RefusedError: Other copies have that room, and the host has no more.
        """
        # No step writes into a home that is lent, or returns to it.
        if not home.has_entry and lending.has_one_borrower(home.tensor):
            return span
        region = self.arena.allocate(span.numel())
        self.land()  # the range may have belonged to a tensor that is still on its way home
        made = self.arena.tensor(region, torch.uint8, span.shape, (1,))
        copy_across(made, span)
        lending.lend(made, object(), is_lasting=True)
        return made

    def writable(self, home: Home) -> Home:
        """Returns a home in place of one that a save reads: another one of the spare, or, where
        that is used up or a caller has a view, which cannot follow, the same one once the save has
        given it back; the host waits for that.
        """
        if not lending.is_lent(home.tensor):  # as nearly always
            return home
        found: list[Home] = []

        def is_found() -> bool:
            is_lasting = lending.is_lasting(home.tensor)
            if not lending.is_lent(home.tensor):
                found.append(home)
            elif is_lasting or not self.has_views(home):
                region = self.arena.find_room(home.num_bytes)
                if region is None and is_lasting:
                    region = self.arena.allocate(home.num_bytes)
                if region is not None:
                    found.append(self._home_in(region, home.tensor, home.value))
                    self.show_instead(found[0], home)
            return bool(found)

        if not is_found():
            lending.wait_until(is_found)
        return found[0]

    def _home_in(self, region: Region, model: Tensor, like: Tensor) -> Home:
        tensor = self.arena.tensor(region, model.dtype, model.shape, model.stride())
        return Home(tensor, region, wrapped_like(tensor, like))

    def reserved_for(self, parameter: Tensor) -> dict[str, Home]:
        """Returns the homes for a parameter's state that is not made yet, by key."""
        return self.reserved.setdefault(id(parameter), {})

    def forget_reserved(self, owners: Collection[int]) -> None:
        """Gives back what is reserved for other parameters than those with these ``id``."""
        self.reserved = {owner: made for owner, made in self.reserved.items() if owner in owners}

    def reserve(self, parameter: Tensor, schema: Mapping[str, Tensor]) -> None:
        """Makes homes for state to come, where there are none that fit."""
        reserved = self.reserved_for(parameter)
        for key, like in schema.items():
            if not self.fits(reserved.get(key), like):
                reserved[key] = self.allocate(like)

    def fits(self, home: Home | None, like: Tensor, shape: torch.Size | None = None) -> bool:
        """Returns whether a home is such as ``allocate`` would make, and may be written."""
        if home is None or lending.is_lent(home.tensor):
            return False
        return strided_as(home.tensor) == strided_as(_model_of(like, shape))

    def takes(self, home: Home | None, value: Tensor) -> TypeGuard[Home]:
        """Returns whether a value may go into a home: it is as large, and no save reads that."""
        return (
            home is not None
            and (home.tensor.shape, home.tensor.dtype) == (value.shape, value.dtype)
            and not lending.is_lent(home.tensor)
        )

    def fill(self, home: Home | None, value: Tensor) -> Home:
        """Returns the home of a value, into which the host has copied what was not there: a shown
        tensor's own, where no entry has that.
        """
        found = self.find(value)
        if found is not None and not found.has_entry:
            self._shown.setdefault(found, value)
            return found
        chosen = self.chosen_for(home, value)
        self.write(chosen, value)
        return chosen

    def chosen_for(self, home: Home | None, value: Tensor) -> Home:
        """Returns ``home``, where a value fits and no caller has it, or a new home."""
        local = local_of(value).detach()
        if home is not None and _memory(home.tensor) == _memory(local):
            return home
        if self.has(value):
            home = None  # never copied onto bytes that it may be a view of
        if not self.takes(home, local) or self.is_held(home):
            home = self.allocate(value)
            # The range may have belonged to a tensor whose last copy home has not landed yet.
            self.land()
        return home

    def home_to_fill(self, home: Home | None, like: Tensor) -> Home:
        """Returns a home that a restore may fill: the given one, where it fits in strides, too.

        One that a save reads is left to it, or the host waits. ``chosen_for`` leaves a home that a
        caller holds; a restore fills it, as he is to see what was saved.
        """
        if (
            home is not None
            and strided_as(home.tensor) == strided_as(local_of(like))
            and not self.is_replaced(home)
        ):
            return self.writable(home)
        return self.allocate(like)

    def write(self, home: Home, value: Tensor) -> None:
        """Copies a value into the home that ``chosen_for`` gave for it."""
        local = local_of(value).detach()
        if _memory(home.tensor) != _memory(local):
            copy_across(home.tensor, local)
        if is_sharded(value):
            home.value = wrapped_like(home.tensor, value)

    def copy_of(self, home: Home) -> Home:
        """Makes a home with the bytes of another."""
        made = self.allocate(home.value)
        self.land()  # the range may have belonged to a tensor that is still on its way home
        made.tensor.copy_(home.tensor)
        return made

    def show(self, home: Home) -> Tensor:
        """Returns what a caller sees of a home: the same tensor while the caller keeps it."""
        shown = self._shown.get(home)
        if shown is None and home.tensor.numel():
            with callers_modes_off():
                local, view = another_over(home.tensor, home)
                shown = wrapped_like(local, home.value)
            home.views.append(view)
        elif shown is None:
            shown = home.value
        self._note_shown(home, shown)
        return shown

    def show_instead(self, home: Home, before: Home) -> None:
        """Binds what a caller was shown of a home that a save reads to the one in its place."""
        shown = self._shown.pop(before, None) if self.is_held(before) else None
        if shown is not None:
            before.num_writes += write_count(shown)
            with torch.no_grad():
                local_of(shown).data = local_of(self.show(home))
            self._note_shown(home, shown)

    def _note_shown(self, home: Home, shown: Tensor) -> None:
        if home.tensor.numel():
            self._shown[home] = shown
            self._by_address[home.tensor.data_ptr()] = home

    def find(self, value: Tensor) -> Home | None:
        """Returns the home whose shown tensor, or an equal view of it, is ``value``."""
        local = local_of(value)
        if not local.is_cpu or not local.numel():
            return None
        home = self._by_address.get(local.data_ptr())
        if home is None or is_sharded(home.value) != is_sharded(value):
            return None
        return home if strided_as(home.tensor) == strided_as(local) else None

    def has(self, value: Tensor) -> bool:
        """Returns whether a value lies in a home."""
        local = local_of(value)
        return local.is_cpu and local.numel() > 0 and self.arena.holds(local)

    def is_replaced(self, home: Home) -> bool:
        """Returns whether a caller has put the tensor that he was shown over other memory."""
        shown = self._shown.get(home)
        return shown is not None and _memory(local_of(shown)) != _memory(home.tensor)

    def require_in_place(self, homes_by_key: Mapping[str, Home]) -> None:
        """Requires that callers have left the tensors that they were shown where they were.

        Raises:
            RefusedError: One was put over other memory.
        """
        for key, home in homes_by_key.items() if self._shown else ():
            if self.is_replaced(home):
                refuse_replaced(key)

    @property
    def is_shown(self) -> bool:
        """Whether a caller has looked at the state since a step found that tensor gone."""
        return bool(self._shown)

    def fence(self) -> None:
        """Brings all state home, and blocks the host until it is there."""
        self.bring_home()
        self.land()

    def bring_home(self) -> None:
        """Makes what is newer on the device come home; the host does not wait."""
        ahead = None if self.ahead is None else self.ahead()
        if ahead is not None:
            ahead.bring_home()

    def land(self) -> None:
        """Blocks the host until no copy home is under way, of whatever parameter."""
        if self.newest is not None:
            self.newest.synchronize()  # the caller reads homes, or writes into them

    def enter(self, home: Home) -> None:
        """Takes note that an entry of the state gets a home."""
        self.version += 1
        home.has_entry = True

    def leave(self, home: Home) -> None:
        """Takes note that an entry loses a home; what callers were shown of it is theirs alone
        then.
        """
        self.version += 1
        home.has_entry = False
        num_writes = self.num_writes(home)
        self._shown.pop(home, None)
        home.num_writes = num_writes  # last: who asks meanwhile counts no write twice

    def is_written(self, home: Home) -> bool:
        """Returns whether a caller has written to the shown tensor since the last step."""
        shown = self._shown.get(home)
        return shown is not None and write_count(shown) > 0

    def num_writes(self, home: Home) -> int:
        """Returns a number that grows with what callers write to what they were shown."""
        shown = self._shown.get(home)
        return home.num_writes + (0 if shown is None else write_count(shown))

    def held(self) -> list[Home]:
        """Returns the homes of the state that callers can reach without a new look."""
        homes = {*self._shown, *self._held_views}
        held = [home for home in homes if self.is_held(home)]
        self._held_views = weakref.WeakSet(held)
        return [home for home in held if home.has_entry]

    def is_held(self, home: Home) -> bool:
        """Returns whether a caller can reach a home's bytes without a new look at the state.

        The shown tensor is let go of, and lives on only where the caller has it.
        """
        if home in self._shown:
            if self.is_replaced(home):
                return True
            num_writes = self.num_writes(home)
            reference = weakref.ref(self._shown.pop(home))
            shown = reference()
            if shown is not None:
                self._shown[home] = shown
                return True
            home.num_writes = num_writes
        home.views = [view for view in home.views if view() is not None]
        if home.views:
            self._held_views.add(home)
        return bool(home.views)

    def has_views(self, home: Home) -> bool:
        """Returns whether a caller has more of a home than the tensor that he was shown."""
        is_held, shown = self.is_held(home), self._shown.get(home)
        return is_held and not (shown is not None and is_only_one(local_of(shown)))


def _memory(tensor: Tensor) -> tuple[object, ...]:
    return (tensor.device.type, tensor.data_ptr(), *strided_as(tensor))


def _model_of(like: Tensor, shape: torch.Size | None) -> Tensor:
    like = local_of(like)
    if shape is not None:
        return torch.empty(shape, dtype=like.dtype, device="meta")
    # What is not dense is copied row by row (raw_bytes), so its home is contiguous.
    if not is_dense(like):
        return torch.empty(like.shape, dtype=like.dtype, device="meta")
    return torch.empty_like(like, device="meta", memory_format=torch.preserve_format)
