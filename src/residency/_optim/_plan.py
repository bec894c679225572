"""What moves together in a step: parameters in group order, packed into units of at most a bucket
of state.

A unit is one shadow step. It is whole parameters, or a cut of one large parameter of an
element-wise optimizer. Invariant: within a slot, entries are aligned as allocations would be and
follow each other as they do in the slab, so that a unit is as few copies as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from residency._optim._homes import Home
from residency._optim._masters import MASTER, master_like
from residency._optim._schema import StateSize
from residency._optim._separable import CUT
from residency._optim._state import ParameterState, State
from residency._transfer import Run, align_up, local_of


class Member(NamedTuple):
    """Is a parameter with the index of its group."""

    group_index: int
    parameter: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Is a parameter, or the elements ``[start, stop)`` of a contiguous one.

    Attributes:
        is_last: Whether what the pieces of a parameter share (``step``) is taken from this one.
    """

    group_index: int
    parameter: Tensor
    start: int = 0
    stop: int | None = None
    is_last: bool = True

    @property
    def is_whole(self) -> bool:
        return self.stop is None


class SlotView(NamedTuple):
    """Is where a state lies in a slot and what it looks like there."""

    offset: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def of(self, slot: Tensor) -> Tensor:
        """Returns the state's tensor in ``slot``, a view of it in the state's dtype."""
        return slot.as_strided(self.shape, self.stride, self.offset // self.dtype.itemsize)


@dataclass(slots=True)
class Unit:
    """Is what one shadow step takes, and the copies before and after it."""

    pieces: Sequence[Piece]
    views: list[dict[str, SlotView]] = field(default_factory=list)
    loads: list[Run] = field(default_factory=list)
    stores: list[Run] = field(default_factory=list)
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Is the order of one step.

    Attributes:
        resident: Pieces whose state stays on the device; stepped first, while the first copies run.
        streamed: Units whose state exists.
        births: Units with parameters whose state this step makes; stepped last, one buffer each.
    """

    resident: tuple[Piece, ...]
    streamed: tuple[Unit, ...]
    births: tuple[Unit, ...]

    @property
    def slot_bytes(self) -> int:
        """Returns the bytes of a device buffer that holds any streamed unit."""
        return max((unit.num_bytes for unit in self.streamed), default=0)


def make_plan(
    members: Iterable[Member],
    state: State,
    *,
    resident: set[Tensor],
    bucket_bytes: int,
    can_cut: bool,
    size_of: Callable[[Member], StateSize | None],
    has_master: Callable[[Tensor], bool],
) -> Plan:
    """Plans a step over the parameters that have a gradient.

    Args:
        members: The parameters, in group order.
        state: The optimizer's state.
        resident: The parameters whose state stays on the device.
        bucket_bytes: The most bytes of state in a unit, unless one parameter that cannot be cut has
            more.
        can_cut: Whether the optimizer is element-wise.
        size_of: Estimates the state of a parameter that has none yet.
        has_master: Whether a parameter's master is part of its state.
    """
    stay: list[Piece] = []
    streamed, births = _Packer(bucket_bytes), _Packer(bucket_bytes)
    for member in members:
        if member.parameter in resident:
            stay.append(Piece(*member))
            continue
        inner = state.peek(member.parameter)
        lacks_master = has_master(member.parameter) and MASTER not in (inner or ())
        size = known_size(inner, member.parameter, lacks_master) if inner else size_of(member)
        is_made = bool(inner) and not lacks_master
        packer = streamed if is_made or (size is not None and not size.num_bytes) else births
        is_cuttable = can_cut and _is_cuttable(member.parameter, inner)
        packer.add(member, size, is_cuttable=is_cuttable)
    return Plan(
        tuple(stay),
        tuple(lay_out(pieces, state) for pieces in streamed.finish()),
        tuple(lay_out(pieces, state) for pieces in births.finish()),
    )


def known_size(inner: ParameterState, parameter: Tensor, lacks_master: bool) -> StateSize:
    """Returns the size of a state that exists, as far as it moves, and of a master to be made."""
    master = [master_like(parameter)] if lacks_master else []
    return StateSize.of([*(home.value for home in inner.homes_by_key.values()), *master])


def _is_cuttable(parameter: Tensor, inner: ParameterState | None) -> bool:
    homes = [home.tensor for home in inner.homes_by_key.values()] if inner else []
    local = local_of(parameter)
    return local.is_contiguous() and all(
        t.dim() == 0 or (t.shape == local.shape and t.is_contiguous()) for t in homes
    )


class _Packer:
    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._units: list[list[Piece]] = []
        self._open: list[Piece] = []
        self._open_bytes = 0

    def add(self, member: Member, size: StateSize | None, *, is_cuttable: bool) -> None:
        if size is None:
            self._close()
            self._units.append([Piece(*member)])
        elif size.num_bytes > self._bucket_bytes and is_cuttable:
            self._close()
            self._units += [[piece] for piece in self._cut(member, size)]
        else:
            if self._open_bytes + size.num_bytes > self._bucket_bytes:
                self._close()
            self._open.append(Piece(*member))
            self._open_bytes += size.num_bytes

    def finish(self) -> list[list[Piece]]:
        self._close()
        return self._units

    def _close(self) -> None:
        if self._open:
            self._units.append(self._open)
        self._open, self._open_bytes = [], 0

    def _cut(self, member: Member, size: StateSize) -> list[Piece]:
        count = local_of(member.parameter).numel()
        overhead = align_up(1) * (len(size.itemsizes) + size.num_scalars)
        room = max(self._bucket_bytes - overhead, 0) // max(sum(size.itemsizes), 1)
        length = max(room // CUT * CUT, CUT)
        starts = range(0, count, length)
        if len(starts) < 2:
            return [Piece(*member)]
        return [
            Piece(*member, start, min(start + length, count), start == starts[-1])
            for start in starts
        ]


def lay_out(pieces: Sequence[Piece], state: State) -> Unit:
    """Returns the unit of these pieces: where their states lie in a slot, and the copies."""
    unit = Unit(pieces)
    loads: list[tuple[Run, bool]] = []
    stores: list[tuple[Run, bool]] = []
    for piece in pieces:
        inner = state.peek(piece.parameter)
        views: dict[str, SlotView] = {}
        for key, home in (inner.homes_by_key if inner else {}).items():
            is_shared = not piece.is_whole and home.tensor.dim() == 0
            view, run = _place(
                piece, home, unit.num_bytes, is_cut=not piece.is_whole and not is_shared
            )
            views[key] = view
            unit.num_bytes += align_up(run.num_bytes)
            is_padded = piece.is_whole or is_shared
            if run.num_bytes:
                loads.append((run, is_padded))
            if run.num_bytes and (piece.is_last or not is_shared):
                stores.append((run, is_padded))
        unit.views.append(views)
    unit.loads, unit.stores = _join(loads), _join(stores)
    return unit


def _place(piece: Piece, home: Home, offset: int, *, is_cut: bool) -> tuple[SlotView, Run]:
    tensor, region = home.tensor, home.region
    start = 0
    shape, stride = tensor.shape, tensor.stride()
    if is_cut:
        assert piece.stop is not None
        start = piece.start * tensor.element_size()
        shape, stride = torch.Size([piece.stop - piece.start]), (1,)
    num_bytes = shape.numel() * tensor.element_size()
    run = Run(region.slab, region.offset + start, offset, num_bytes)
    return SlotView(offset, tensor.dtype, shape, stride), run


def _join(runs: Iterable[tuple[Run, bool]]) -> list[Run]:
    """Joins copies that follow each other on both sides.

    The padding after a whole entry belongs to nobody and may be copied along; after a cut, the
    bytes up to the next alignment are the next cut's.
    """
    joined: list[tuple[Run, bool]] = []
    for run, is_padded in runs:
        if joined:
            last, was_padded = joined[-1]
            reach = align_up(last.num_bytes) if was_padded else last.num_bytes
            if (
                last.slab is run.slab
                and last.slab_offset + reach == run.slab_offset
                and last.slot_offset + reach == run.slot_offset
            ):
                grown = Run(last.slab, last.slab_offset, last.slot_offset, reach + run.num_bytes)
                joined[-1] = (grown, is_padded)
                continue
        joined.append((run, is_padded))
    return [run for run, _ in joined]
