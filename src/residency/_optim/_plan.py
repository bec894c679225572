"""What moves together in a step: parameters in group order, packed into units of at most a bucket
of state.

A unit is one shadow step. It is whole parameters, or a cut of one large parameter of an
element-wise optimizer. Invariant, which ``tests/optim/test_small_tensors.py`` tries to break:
within a slot, entries are aligned as allocations would be and follow each other as they do in the
slab, so that a unit is as few copies as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, compress, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from residency._dtensor import is_sharded, local_of
from residency._errors import RefusedError
from residency._optim._homes import Home
from residency._optim._masters import MASTER, master_like
from residency._optim._places import Residents
from residency._optim._state import ParameterState
from residency._optim._states import State
from residency._optim._ties import Ties
from residency._optim._trial._first_step import StateSize
from residency._optim._trial._separable import CUT
from residency._transfer import CopyRun, align_up, joined_runs

_DENSE = frozenset((torch.strided,))
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD)


class Member(NamedTuple):
    """A parameter with the index of its group."""

    group_index: int
    parameter: Tensor


@dataclass(frozen=True, slots=True)
class Members:
    """The parameters of a step in group order, in lists, which are the quickest to go through."""

    group_indices: list[int]
    parameters: list[Tensor]
    gradients: list[Tensor]

    def __iter__(self) -> Iterator[Member]:
        return map(Member, self.group_indices, self.parameters)


@dataclass(slots=True, eq=False)
class Seat:
    """The place of a member in a plan; empty between steps, so that the plan keeps no parameter.

    Attributes:
        inner: The parameter's state as the step found it, None where there was none.
    """

    parameter: Tensor | None
    inner: ParameterState | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A parameter, or the elements ``[start, stop)`` of a contiguous one.

    Attributes:
        seat: Of the parameter.
        is_last: Whether what the pieces of a parameter share (``step``) is taken from this one.
    """

    group_index: int
    seat: Seat
    start: int = 0
    stop: int | None = None
    is_last: bool = True

    @property
    def parameter(self) -> Tensor:
        """The parameter, while a step runs."""
        parameter = self.seat.parameter
        assert parameter is not None, "the plan is used outside of a step"
        return parameter

    @property
    def is_whole(self) -> bool:
        return self.stop is None


class SlotViews(NamedTuple):
    """One state in a slot, or several of one shape at equal distances: where, and how strided.

    Offset, strides and distance count elements of the slot in the states' dtype.
    """

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    num_views: int = 1
    distance: int = 0


HomesByKey = Mapping[str, Home]


@dataclass(slots=True)
class Unit:
    """The pieces that one shadow step takes, and the copies before and after it.

    Attributes:
        keys: Of each piece, those of its states in the slot.
        all_keys: How many each piece has, and then the keys.
        views: The states in the slot, in the order of the pieces and their keys.
        seats: Those of the pieces.
        in_groups: The indices of groups, each with the number of pieces that follow each other.
        sharded: The pieces of sharded parameters.
        are_whole: Whether each piece is a whole parameter.
    """

    pieces: Sequence[Piece]
    keys: list[tuple[str, ...]] = field(default_factory=list)
    all_keys: list[Any] = field(default_factory=list)
    views: list[SlotViews] = field(default_factory=list)
    loads: list[CopyRun] = field(default_factory=list)
    stores: list[CopyRun] = field(default_factory=list)
    num_bytes: int = 0
    seats: list[Seat] = field(init=False)
    in_groups: list[tuple[int, int]] = field(init=False)
    sharded: list[Piece] = field(init=False)
    are_whole: bool = field(init=False)

    def __post_init__(self) -> None:
        self.seats = [piece.seat for piece in self.pieces]
        runs = groupby(piece.group_index for piece in self.pieces)
        self.in_groups = [(index, len(list(run))) for index, run in runs]
        self.sharded = [piece for piece in self.pieces if is_sharded(piece.parameter)]
        self.are_whole = len(self.pieces) != 1 or self.pieces[0].is_whole  # a cut goes alone

    @property
    def state_bytes(self) -> int:
        """The bytes of the states in the slot, without the ends that align them; of a cut, what all
        cuts of a parameter share counts with the last.
        """
        is_last = self.pieces[0].is_last
        own = (view for view in self.views if is_last or view.shape)
        return sum(v.num_views * v.shape.numel() * v.dtype.itemsize for v in own)


@dataclass(slots=True)
class Plan:
    """The order of one step.

    Attributes:
        resident: Pieces whose state stays on the device; stepped first, while the first copies run.
        streamed: Units whose state exists.
        fresh: Units with parameters whose state this step makes; stepped last, one buffer each.
        seats: Of the members, in their order.
        is_one_list: Whether all parameters go through one step, whole and in their order, as
            without an offload.
        slot_bytes: The bytes of a device buffer that holds any streamed unit.
    """

    resident: Unit
    streamed: tuple[Unit, ...]
    fresh: tuple[Unit, ...]
    seats: tuple[Seat, ...]
    is_one_list: bool = field(init=False)
    slot_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        units = [unit for unit in (self.resident, *self.streamed, *self.fresh) if unit.pieces]
        self.is_one_list = len(units) == 1 and len(units[0].pieces) == len(self.seats)
        self.slot_bytes = max((unit.num_bytes for unit in self.streamed), default=0)

    def seat(self, parameters: Sequence[Tensor], inners: Sequence[ParameterState | None]) -> None:
        """Gives the plan the parameters of a step, which are those that it was made for, with their
        states.
        """
        for seat, parameter, inner in zip(self.seats, parameters, inners, strict=True):
            seat.parameter, seat.inner = parameter, inner

    def leave(self) -> None:
        """Lets go of the parameters."""
        for seat in self.seats:
            seat.parameter = seat.inner = None


def members_with_gradient(optimizer: Optimizer) -> Members:
    """Returns the parameters that this step changes, in group order.

    Raises:
        RefusedError: A gradient is sparse, or lies in an order that a fused step does not take.
    """
    members = Members([], [], [])
    for index, group in enumerate(optimizer.param_groups):
        gradients = [parameter.grad for parameter in group["params"]]
        found = [gradient for gradient in gradients if gradient is not None]
        for gradient in () if {each.layout for each in found} <= _DENSE else found:
            if gradient.layout is not torch.strided:
                raise RefusedError(
                    f"a parameter of shape {tuple(gradient.shape)} has a gradient of layout "
                    f"{gradient.layout}; an offloaded optimizer takes dense gradients only. "
                    "Nothing was stepped: use `sparse=False`, or onload_optimizer first."
                )
        if group.get("fused") and isinstance(optimizer, _FUSED):
            _check_strides(group["params"])
        have_one = (gradient is not None for gradient in gradients)
        is_all = len(found) == len(gradients)
        members.group_indices.extend([index] * len(found))
        members.parameters.extend(
            group["params"] if is_all else compress(group["params"], have_one)
        )
        members.gradients.extend(found)
    return members


def _check_strides(parameters: Iterable[Tensor]) -> None:
    """Refuses what CUDA's fused kernels would, after the buckets before have been stepped."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None or parameter.is_cpu or gradient.stride() == parameter.stride():
            continue
        steps = zip(parameter.shape, gradient.stride(), parameter.stride(), strict=True)
        if any(size != 1 and one != other for size, one, other in steps):
            raise RefusedError(
                f"a parameter of strides {parameter.stride()} has a gradient of strides "
                f"{gradient.stride()}; a fused step takes gradients that lie as their parameters "
                "do. Nothing was stepped: copy it into `torch.empty_like(parameter)`, or leave out "
                "fused."
            )


def make_plan(
    members: Iterable[Member],
    state: State,
    *,
    resident: Residents,
    bucket_of: Callable[[int, int], int],
    can_cut: bool,
    size_of: Callable[[Member], StateSize | None],
    later_of: Callable[[Member], Mapping[str, Tensor]],
    has_master: Callable[[Tensor], bool],
    ties: Ties = (),
) -> Plan:
    """Plans a step over the parameters that have a gradient.

    Args:
        members: The parameters, in group order.
        state: The optimizer's state.
        resident: The parameters whose state stays on the device.
        bucket_of: Returns the most bytes of state in a unit, unless one parameter that cannot be
            cut has more; it gets the bytes of all states and of the largest that cannot be cut.
        can_cut: Whether the optimizer is element-wise.
        size_of: Estimates the state of a parameter that has none yet.
        later_of: Foresees what steps after the first make besides, by key.
        has_master: Whether a parameter's master is part of its state.
        ties: Groups of members, by index, that belong into one unit; none of them is cut.
    """
    stay: list[Piece] = []
    moving: list[_Moving] = []
    planned = list(members)
    state.require_own_mappings("Nothing was stepped")
    seats = [Seat(member.parameter) for member in planned]
    for tie in _tied(len(planned), ties):
        group = [planned[index] for index in tie]
        pieces = [Piece(planned[index].group_index, seats[index]) for index in tie]
        if all(member.parameter in resident for member in group):
            stay += pieces
            continue
        inners = [state.peek(member.parameter) for member in group]
        sizes: list[StateSize | None] = []
        is_fresh = False
        for member, inner in zip(group, inners, strict=True):
            missing: list[Tensor] = []
            if inner:
                missing = [like for key, like in later_of(member).items() if key not in inner]
            if has_master(member.parameter) and MASTER not in (inner or ()):
                missing.append(master_like(member.parameter))
            size = known_size(inner, missing) if inner else size_of(member)
            is_made = bool(inner) and not missing
            is_fresh |= not is_made and (size is None or size.num_bytes > 0)
            sizes.append(size)
        is_cuttable = can_cut and len(group) == 1 and _is_cuttable(group[0].parameter, inners[0])
        moving.append(_Moving(pieces, _sum_of(sizes), is_fresh, is_cuttable))
    streamed, fresh = (
        tuple(lay_out(pieces, homes_of(pieces, state)) for pieces in packed)
        for packed in _packed(moving, bucket_of)
    )
    return Plan(Unit(stay, [()] * len(stay)), streamed, fresh, tuple(seats))


def _packed(
    moving: Sequence[_Moving], bucket_of: Callable[[int, int], int]
) -> tuple[list[list[Piece]], list[list[Piece]]]:
    """Returns the pieces of each unit: those of states that exist, and of states to come."""
    known = [(each.size.num_bytes, each.is_cuttable) for each in moving if each.size is not None]
    whole_bytes = max((size for size, is_cuttable in known if not is_cuttable), default=0)
    bucket_bytes = bucket_of(sum(size for size, _ in known), whole_bytes)
    streamed, fresh = _Packer(bucket_bytes), _Packer(bucket_bytes)
    for each in moving:
        packer = fresh if each.is_fresh else streamed
        packer.add(each.pieces, each.size, is_cuttable=each.is_cuttable)
    return streamed.finish(), fresh.finish()


def _tied(num_members: int, ties: Ties) -> Iterator[tuple[int, ...]]:
    """Yields the members' indices in order, those of a tie together where the first of them is."""
    tie_of = {index: tie for tie in ties for index in tie}
    for index in range(num_members):
        tie = tie_of.get(index, (index,))
        if index == tie[0]:
            yield tie


def _sum_of(sizes: Sequence[StateSize | None]) -> StateSize | None:
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return None
    return known[0] if len(known) == 1 else StateSize(sum(s.num_bytes for s in known), (), 0)


def known_size(inner: ParameterState, missing: Sequence[Tensor]) -> StateSize:
    """Returns the size of a state that exists, as far as it moves, and of what is to come."""
    return StateSize.of([*(home.value for home in inner.homes_by_key.values()), *missing])


def _is_cuttable(parameter: Tensor, inner: ParameterState | None) -> bool:
    homes = [home.tensor for home in inner.homes_by_key.values()] if inner else []
    local = local_of(parameter)
    return local.is_contiguous() and all(
        t.dim() == 0 or (t.shape == local.shape and t.is_contiguous()) for t in homes
    )


class _Moving(NamedTuple):
    """A group of parameters that goes through one unit, with the size of its state if known."""

    pieces: list[Piece]
    size: StateSize | None
    is_fresh: bool
    is_cuttable: bool


class _Packer:
    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._units: list[list[Piece]] = []
        self._open: list[Piece] = []
        self._open_bytes = 0

    def add(self, wholes: Sequence[Piece], size: StateSize | None, *, is_cuttable: bool) -> None:
        if size is None:
            self._close()
            self._units.append(list(wholes))
        elif size.num_bytes > self._bucket_bytes and is_cuttable:
            self._close()
            self._units += [[piece] for piece in self._cut(wholes[0], size)]
        else:
            if self._open_bytes + size.num_bytes > self._bucket_bytes:
                self._close()
            self._open += wholes
            self._open_bytes += size.num_bytes

    def finish(self) -> list[list[Piece]]:
        self._close()
        return self._units

    def _close(self) -> None:
        if self._open:
            self._units.append(self._open)
        self._open, self._open_bytes = [], 0

    def _cut(self, whole: Piece, size: StateSize) -> list[Piece]:
        # Flat ranges, not rows: an element-wise step sees no shapes, and one rule serves all.
        count = local_of(whole.parameter).numel()
        overhead = align_up(1) * (len(size.itemsizes) + size.num_scalars)
        room = max(self._bucket_bytes - overhead, 0) // max(sum(size.itemsizes), 1)
        length = max(room // CUT * CUT, CUT)
        starts = range(0, count, length)
        if len(starts) < 2:
            return [whole]
        return [
            replace(
                whole,
                start=start,
                stop=min(start + length, count),
                is_last=start == starts[-1],
            )
            for start in starts
        ]


def lay_out(pieces: Sequence[Piece], homes: Sequence[HomesByKey]) -> Unit:
    """Returns the unit of these pieces: where their states lie in a slot, and the copies.

    Args:
        pieces: Its parts.
        homes: Those of each piece's states.
    """
    unit = Unit(pieces)
    loads: list[tuple[CopyRun, bool]] = []
    stores: list[tuple[CopyRun, bool]] = []
    views: list[SlotViews] = []
    for piece, by_key in zip(pieces, homes, strict=True):
        unit.keys.append(tuple(by_key))
        for home in by_key.values():
            is_shared = not piece.is_whole and home.tensor.dim() == 0
            is_cut = not piece.is_whole and not is_shared
            run = _run_of(piece, home, unit.num_bytes, is_cut=is_cut)
            views.append(_view_of(piece, home, unit.num_bytes, is_cut=is_cut))
            unit.num_bytes += align_up(run.num_bytes)
            is_padded = piece.is_whole or is_shared
            if run.num_bytes:
                loads.append((run, is_padded))
            if run.num_bytes and (piece.is_last or not is_shared):
                stores.append((run, is_padded))
    unit.views = _join_views(views)
    unit.all_keys = [*map(len, unit.keys), *chain.from_iterable(unit.keys)]
    unit.loads, unit.stores = joined_runs(loads), joined_runs(stores)
    return unit


def homes_of(pieces: Sequence[Piece], state: State) -> list[HomesByKey]:
    """Returns the homes of each piece's states, by key."""
    inners = [state.peek(piece.parameter) for piece in pieces]
    return [dict(inner.homes_by_key) if inner is not None else {} for inner in inners]


def _view_of(piece: Piece, home: Home, offset: int, *, is_cut: bool) -> SlotViews:
    tensor = home.tensor
    start = offset // tensor.element_size()
    if not is_cut:
        return SlotViews(tensor.dtype, tensor.shape, tensor.stride(), start)
    assert piece.stop is not None
    return SlotViews(tensor.dtype, torch.Size([piece.stop - piece.start]), (1,), start)


def _join_views(views: Iterable[SlotViews]) -> list[SlotViews]:
    """Joins views that are alike and follow each other at equal distances."""
    joined: list[SlotViews] = []
    for view in views:
        last = joined[-1] if joined else view
        distance = last.distance if last.num_views > 1 else view.offset - last.offset
        is_next = view.offset == last.offset + last.num_views * distance and distance >= 0
        if joined and is_next and view[:3] == last[:3]:
            joined[-1] = last._replace(num_views=last.num_views + 1, distance=distance)
        else:
            joined.append(view)
    return joined


def _run_of(piece: Piece, home: Home, offset: int, *, is_cut: bool) -> CopyRun:
    region, itemsize = home.region, home.tensor.element_size()
    if not is_cut:
        return CopyRun(region.slab, region.offset, offset, home.num_bytes)
    assert piece.stop is not None
    start = region.offset + piece.start * itemsize
    return CopyRun(region.slab, start, offset, (piece.stop - piece.start) * itemsize)
