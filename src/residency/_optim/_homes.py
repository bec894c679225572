"""Where the state of an offloaded optimizer lives: a tensor of host memory for each state.

Invariant, which ``tests/optim/test_kept_states.py`` tries to break: bytes go into a home only
through ``Homes.fill``, a copy home of the step, or a restore, and never while a save reads them.

[Note: what callers hold] A caller who reads a state gets a tensor over its home's bytes with a
storage of its own, the shown one. It is the live state, as without an offload: the caller may keep
it and views of it, read and write them. So a step that finds one alive, at its begin or its end,
waits for its copies home before it returns; a step without one does not wait. Assignments follow
the tensors, too: a shown one that is assigned to another key takes its home along, and a home that
is held, or has two entries, is never filled with another's bytes. Where a caller gives a shown
tensor other memory (``.data =``, ``set_``, ``share_memory_``), that is the home from then on. Such
memory is known for as long as any tensor has it, also while no entry does, as within an exchange of
two entries.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor

from residency._dtensor import is_sharded, local_of, wrapped_like, write_count
from residency._errors import RefusedError
from residency._modes import callers_modes_off
from residency._optim._arrivals import Arrivals
from residency._storages import (
    WeakRange,
    bytes_over,
    is_dense,
    laid_over,
    overlapping,
    span_of,
    strided_as,
)
from residency._transfer import (
    Gate,
    Lanes,
    Region,
    Slab,
    SlabArena,
    align_up,
    another_over,
    copy_across,
    gate_of,
    is_only_one,
    lanes_of,
    lending,
    own_instead,
)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Home:
    """The place of one state tensor.

    Attributes:
        tensor: The bytes; of a sharded state, the local tensor.
        region: The range under them.
        value: The tensor, or a ``DTensor`` around it.
        num_entries: How many keys of the state have it.
        is_callers: Whether the memory is a caller's, who may read and write it at any time.
        moved_to: The home in its place, where a caller has replaced the memory.
        views: References that live as long as a caller holds the shown tensor, or a view of it.
        num_writes: How often callers wrote to tensors that they were shown and let go of.
        is_watched: Whether a save that keeps the bytes for good finds out when callers write.
    """

    tensor: Tensor
    region: Region
    value: Tensor
    num_entries: int = 0
    is_callers: bool = False
    moved_to: Home | None = None
    views: list[weakref.ref[Any]] = field(default_factory=list)
    num_writes: int = 0
    is_watched: bool = False

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    def move_to(self, other: Home) -> None:
        """Puts another home in the place of this one.

        What callers hold keeps only the bytes alive from now on. The other home may lie in it, and
        a cycle through a storage is one that Python's garbage collector cannot see.
        """
        self.moved_to = other
        for view in self.views:
            own_instead(view, self.tensor)


class Homes:
    """The homes of one optimizer: makes and fills them.

    Attributes:
        device: The accelerator that the parameters are on.
        version: Changes whenever a home appears, moves or goes; plans are made for one version.
        newest: The event after the newest copy home, of whatever parameter.
        reserved: Homes for state that is not made yet, by the parameter's ``id`` and by key.
        spare_bytes: Room for states that are written while a save reads their homes.
        has_aliases: Whether two entries of the state may have the same bytes.
        arrivals: The tensors of the device that went to these homes.
        mappings: Every ``ParameterState`` over these homes, by its ``id``.
    """

    def __init__(self, device: torch.device, *, pin: bool = True, spare_bytes: int = 0) -> None:
        self.device = device
        self.arena = SlabArena(pin=pin)
        self.lanes: Lanes = lanes_of(device)
        self.gate: Gate = gate_of(device)
        self.version = 0
        self.newest: torch.Event | None = None
        self.spare_bytes = spare_bytes
        self._num_spare_bytes_made = 0
        # By id: a parameter that is replaced must not live on here. Another at its address takes
        # over homes only where they fit.
        self.reserved: dict[int, dict[str, Home]] = {}
        self.has_aliases = False
        self.arrivals = Arrivals()
        self.mappings: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._shown: dict[Home, Tensor] = {}
        self._held_views: weakref.WeakSet[Home] = weakref.WeakSet()
        self._of_callers: weakref.WeakSet[Home] = weakref.WeakSet()
        # What they lie in, for longer: its storage, the first byte in that, and how many.
        self._callers_memory: list[WeakRange] = []
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
        model = _model_of(local_of(like), shape)
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

    def writable(self, home: Home) -> Home:
        """Returns a home in place of one that a save reads: another one of the spare, or, where
        that is used up or a caller has a view, which cannot follow, the same one once the save has
        given it back; the host waits for that.
        """
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
        return strided_as(home.tensor) == strided_as(_model_of(local_of(like), shape))

    def takes(self, home: Home | None, value: Tensor) -> TypeGuard[Home]:
        """Returns whether a value may go into a home: it is as large, and no save reads that."""
        return (
            home is not None
            and (home.tensor.shape, home.tensor.dtype) == (value.shape, value.dtype)
            and not lending.is_lent(home.tensor)
        )

    def fill(self, home: Home | None, value: Tensor) -> Home:
        """Returns the home of a value, into which the host has copied what was not there."""
        chosen = self.chosen_for(home, value)
        self.write(chosen, value)
        return chosen

    def chosen_for(self, home: Home | None, value: Tensor) -> Home:
        """Returns the home of a value: its own, where it is a shown tensor; else ``home``, where it
        fits and neither a caller nor another entry has it, or a new one.
        """
        local = local_of(value).detach()
        if home is not None and _memory(home.tensor) == _memory(local):
            return home
        found = self.find(value)
        if found is not None:
            self._shown.setdefault(found, value)
            return found
        if self._is_among_homes(local):
            if not lending.is_lasting(local):
                self._make_callers(local)
                return self.over(value)
            home = None  # never copied onto bytes that it may be a view of
        if not self.takes(home, local) or home.num_entries > 1 or self.is_held(home):
            home = self.allocate(value)
            # The range may have belonged to a tensor whose last copy home has not landed yet.
            self.fence()
        return home

    def home_to_fill(self, home: Home | None, like: Tensor) -> Home:
        """Returns a home that a restore may fill: the given one, where it fits in strides, too.

        One that a save reads is left to it, or the host waits. ``chosen_for`` leaves a home that a
        caller holds; a restore fills it, as he is to see what was saved.
        """
        is_alone = home is not None and home.num_entries < 2 and not self.beside(home)
        if home is not None and is_alone and strided_as(home.tensor) == strided_as(local_of(like)):
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
        """Makes a home with the bytes of another, on which no copy is under way."""
        made = self.allocate(home.value)
        made.tensor.copy_(home.tensor)
        return made

    def over(self, value: Tensor) -> Home:
        """Makes a home of a caller's own host memory, which the caller still reads and writes."""
        self.version += 1
        self.has_aliases = True
        tensor = local_of(value).detach()
        whole = common_bytes([tensor])
        region = Region(Slab.over(whole), 0, align_up(whole.numel()))
        home = Home(tensor, region, wrapped_like(tensor, value), is_callers=True)
        self._of_callers.add(home)
        known = [each for each in self._callers_memory if not each.is_gone]
        self._callers_memory = [*known, WeakRange(whole)]
        self._note_shown(home, value)
        return home

    def _make_callers(self, view: Tensor) -> None:
        """Re-creates the tensor shown for a home on the storage of the caller's view of it, so that
        copying or pickling both keeps them tied.
        """
        for home in list(self._by_address.values()):
            storage = view.untyped_storage()
            start = home.tensor.data_ptr() - storage.data_ptr()
            fits = start >= 0 and start + home.num_bytes <= storage.nbytes()
            if home.is_callers or home.moved_to is not None or not fits:
                continue
            shown = self._shown.pop(home, None)
            if shown is None or local_of(shown).untyped_storage().data_ptr() != storage.data_ptr():
                whole = common_bytes([view])
                inside = home.tensor.data_ptr() - whole.data_ptr()
                shown = wrapped_like(laid_over(whole, inside, home.tensor), home.value)
            home.move_to(self.over(shown))

    def show(self, home: Home) -> Tensor:
        """Returns what a caller sees of a home: the same tensor while the caller keeps it."""
        shown = self._shown.get(home)
        if shown is None and home.tensor.numel() and not home.is_callers:
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

    def _is_among_homes(self, tensor: Tensor) -> bool:
        if not tensor.is_cpu or not tensor.numel():
            return False
        return self.arena.holds(tensor) or self._is_callers(tensor)

    def _is_callers(self, tensor: Tensor) -> bool:
        """Returns whether a host tensor has bytes of a caller's memory that is, or was, a home."""
        span = span_of(tensor)
        return span is not None and any(each.meets(span) for each in self._callers_memory)

    def beside(self, home: Home) -> list[Home]:
        """Returns a home and those that share bytes with it; none where it is alone."""
        if not home.is_callers:
            return []
        found = [home, *(o for o in self._of_callers if o is not home and o.num_entries)]
        for group in overlapping([each.tensor for each in found]):
            if 0 in group:
                return [found[index] for index in group]
        return []

    def has(self, value: Tensor) -> bool:
        """Returns whether a value lies in a home."""
        return self.find(value) is not None or self._is_among_homes(local_of(value))

    def follow(self, home: Home) -> Home:
        """Returns the home that callers have made of one, by giving what they were shown other
        memory; mostly the same one.
        """
        if home.moved_to is not None:
            return self.follow(home.moved_to)
        shown = self._shown.get(home)
        if shown is None or _memory(local_of(shown)) == _memory(home.tensor):
            return home
        del self._shown[home]
        local = local_of(shown)
        if local.is_cpu and local.layout is torch.strided and local.numel() and is_dense(local):
            home.move_to(self.over(shown))
        else:
            chosen = self.fill(None, shown)
            home.move_to(chosen)
            with torch.no_grad():
                local.data = local_of(self.show(chosen))
            self._note_shown(chosen, shown)
        return self.follow(home)

    @property
    def is_shown(self) -> bool:
        """Whether a caller has looked at the state since a step found that tensor gone."""
        return bool(self._shown)

    def fence(self) -> None:
        """Blocks the host until no copy home is under way, of whatever parameter."""
        if self.newest is not None:
            self.newest.synchronize()  # the caller reads homes, or writes into them

    def enter(self, home: Home) -> None:
        """Counts an entry of the state that gets a home."""
        self.version += 1
        self.has_aliases |= home.num_entries > 0
        home.num_entries += 1

    def leave(self, home: Home) -> None:
        """Counts an entry that loses a home; what callers were shown of it is theirs alone then."""
        self.version += 1
        home.num_entries -= 1
        if not home.num_entries:
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
        if shown is None and home.moved_to is not None:
            return home.num_writes + self.num_writes(home.moved_to)
        return home.num_writes + (0 if shown is None else write_count(shown))

    def held(self) -> list[Home]:
        """Returns the homes of the state that callers can reach without a new look."""
        homes = {*self._shown, *self._held_views}
        held = [home for home in homes if self.is_held(home)]
        self._held_views = weakref.WeakSet(held)
        return [home for home in held if home.num_entries]

    def is_held(self, home: Home) -> bool:
        """Returns whether a caller can reach a home's bytes without a new look at the state.

        The shown tensor is let go of, and lives on only where the caller has it.
        """
        if home.is_callers:
            return True
        if home in self._shown:
            if _memory(local_of(self._shown[home])) != _memory(home.tensor):
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


def common_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """Returns ``bytes_over``.

    Raises:
        RefusedError: No storage has all of them.
    """
    whole = bytes_over(tensors)
    if whole is None:
        raise RefusedError(
            f"states of the shapes {[tuple(tensor.shape) for tensor in tensors]} share bytes "
            "through several storages, none of which has all of them. Nothing was moved: assign "
            "copies of them to optimizer.state."
        )
    return whole


def _memory(tensor: Tensor) -> tuple[object, ...]:
    return (tensor.device.type, tensor.data_ptr(), *strided_as(tensor))


def _model_of(like: Tensor, shape: torch.Size | None) -> Tensor:
    if shape is not None:
        return torch.empty(shape, dtype=like.dtype, device="meta")
    # What is not dense is copied row by row (raw_bytes), so its home is contiguous.
    if not is_dense(like):
        return torch.empty(like.shape, dtype=like.dtype, device="meta")
    return torch.empty_like(like, device="meta", memory_format=torch.preserve_format)
