"""The step of one unit: what stands in for its parameters and its state, the optimizer's own step
on that, and what came of it, complete before any of it is the optimizer's.

Invariant, which ``tests/optim/test_interruptions.py`` tries to break: until ``UnitStep.apply``
runs, the optimizer's state is that from before the unit; what ``apply`` does may be done twice.
"""

from __future__ import annotations

import copy
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress, islice
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.optim import Optimizer

from residency._dtensor import (
    has_partial_gradient,
    is_sharded,
    local_of,
    locals_of,
    wrapped_like,
)
from residency._errors import ResidencyError
from residency._optim._company import Company
from residency._optim._homes import Home, Homes
from residency._optim._masters import MASTER
from residency._optim._offload_record import Offload
from residency._optim._plan import Piece, Unit
from residency._optim._slots import apart, by_key, views_in
from residency._optim._stand_ins import StandIns
from residency._optim._state import ParameterState
from residency._optim._states import State
from residency._optim._trial._partial_step import MIDWAY, Commit, Shadow, is_torchs_own
from residency._optim._trial._step_call import StepCall
from residency._transfer import CopyRun, raw_bytes

Copy = tuple[Tensor, Sequence[CopyRun]]
_MISSING = object()
_END = object()


@dataclass(slots=True)
class _Change:
    """The changes of one piece to the state of its parameter.

    Attributes:
        is_evicted: Whether values that stayed on the device get homes.
    """

    parameter: Tensor
    homes: dict[str, Home] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)
    is_evicted: bool = False


@dataclass(slots=True)
class Shared:
    """The objects that the parts of one step have in common.

    Attributes:
        commit: Collects what the parts leave outside of state.
        stand_ins: Makes what the step gets in the place of parameters.
        call: What the step is called with.
        making: Homes for states that are complete with a parameter's last piece.
        held: Homes that callers can reach without a new look.
        company: Parameters without elements that each part steps along; see ``_company``.
    """

    optimizer: Optimizer
    offload: Offload
    homes: Homes
    state: State
    commit: Commit
    stand_ins: StandIns
    call: StepCall
    making: dict[Tensor, dict[str, Home]] = field(default_factory=dict)
    held: set[Home] = field(default_factory=set)
    company: Company = ()


class UnitStep:
    """One unit on its way through a step.

    Its lists have an entry for each piece: a step asks much of many small parameters, and lists
    answer the quickest.

    Attributes:
        written: What the step writes in place, but for its slot.
    """

    def __init__(
        self, shared: Shared, unit: Unit, slot: Tensor | None, *, number: int, of: int
    ) -> None:
        self.number = number
        self.unit = unit
        self.slot = slot
        self.fresh: list[Copy] = []
        self.stores: Sequence[CopyRun] | None = None
        self.is_collected = False
        self._shared = shared
        self._optimizer, self._offload = shared.optimizer, shared.offload
        self._homes, self._state = shared.homes, shared.state
        self._parameters = [p for seat in unit.seats if (p := seat.parameter) is not None]
        self._inners = [seat.inner for seat in unit.seats]
        if number > 1:  # an earlier part may have made a state
            of_each = zip(self._inners, self._parameters, strict=True)
            self._inners = [inner or self._state.peek(parameter) for inner, parameter in of_each]
        is_known = is_torchs_own(self._offload.base)
        self._made = views_in(slot, unit, at_once=is_known)
        self._is_copied = number < of and not is_known
        # One step takes shards or local tensors: torch's loops over several cannot mix them.
        self._is_local = self._offload.is_local and not any(
            piece.is_whole and has_partial_gradient(piece.parameter) for piece in unit.sharded
        )
        self._is_plain = not unit.sharded and not self._offload.master_weights
        self._put_in: Sequence[Tensor] = ()
        self._changes: list[_Change] = []
        self._shadow: Shadow | None = None
        self._after: list[dict[str, Any] | None] | None = None
        self._result: tuple[Any] | None = None
        self._given: list[Any] = []
        self._host_before: list[tuple[Tensor, Any]] = []
        pieces = list(unit.pieces)
        self.written = locals_of(self._parameters)
        for piece, inner in zip(unit.pieces, self._inners, strict=True):
            if not len(self._offload.resident):
                break
            if inner is not None and inner.is_resident:
                stay = [local_of(v) for v in dict.values(inner) if _is_on_device(v)]
                self.written += stay
                pieces += [piece] * len(stay)
        # A step on shards may count its writes on the wrapper alone.
        self._watched = [*self.written, *(piece.parameter for piece in unit.sharded)]
        self._watched_pieces = [*pieces, *unit.sharded]
        self._versions = _versions_of(self._watched)

    def watch_slot(self) -> None:
        """Counts the pieces as begun once the slot is written: it is newer than the homes."""
        assert self.slot is not None
        self._watched = [*self._watched, *len(self.unit.pieces) * [self.slot]]
        self._watched_pieces += self.unit.pieces
        self._versions = _versions_of(self._watched)

    @property
    def is_stepped(self) -> bool:
        """Whether the optimizer's own step ran to its end."""
        return self._result is not None

    def step(self) -> None:
        """Runs the optimizer's own step on the unit."""
        groups = [{**group, "params": []} for group in self._optimizer.param_groups]
        if self._is_plain and self.unit.are_whole:
            self._put_in = self._parameters
        else:
            self._put_in = [
                self._shared.stand_ins.of(piece, views, is_local=self._is_local)
                for piece, views in zip(self.unit.pieces, self._views, strict=True)
            ]
        proxies = iter(self._put_in)
        for index, count in self.unit.in_groups:
            groups[index]["params"].extend(islice(proxies, count))
        state = defaultdict(dict, self._states_before())
        for index, parameter in self._shared.company:
            groups[index]["params"].append(parameter)
        base = self._offload.base
        call = self._shared.call
        self._shadow = Shadow(self._optimizer, base, groups, state, self._is_copied, call)
        # One statement: an interrupt finds the step run and known to be, or neither.
        self._result = (self._shadow.step(),)

    def roll_back(self) -> list[Piece]:
        """Undoes on the host what a step did that failed, and returns the pieces whose parameter,
        or resident state, it had begun to change.
        """
        for value, before in self._host_before:
            if isinstance(before, Tensor):
                value.copy_(before)
            else:
                value.fill_(before)
        is_changed = map(operator.ne, _versions_of(self._watched), self._versions)
        return list(dict.fromkeys(compress(self._watched_pieces, is_changed)))

    def collect(self) -> None:
        """Finds out what the step left: writes masters back, and makes homes for new states."""
        assert self._shadow is not None
        self.fresh, self._changes = [], []
        if self._is_as_before():  # changed in place, as nearly always
            self._shared.stand_ins.give_gradients_back(self.unit.pieces)
            self.is_collected = True
            return
        if self._after is None:  # read all of it before the slot is written
            self._after = self._values_after(self._shadow.optimizer.state)
        parts = zip(self.unit.pieces, self._put_in, self._views, self._after, strict=True)
        for piece, stand_in, views, values in parts:
            after = values
            if self._offload.has_master(piece.parameter):
                after = {
                    MASTER: self._shared.stand_ins.write_back(piece, stand_in),
                    **(after or {}),
                }
            if after is not None:
                self._collect(piece, views, after)
        self._shared.stand_ins.give_gradients_back(self.unit.pieces)
        self.is_collected = True

    def _is_as_before(self) -> bool:
        """Returns whether a step left the very values that it got, under the same keys, with
        nothing to make of them.
        """
        assert self._shadow is not None
        if self._offload.master_weights or self._shared.making:
            return False
        after = self._shadow.optimizer.state
        return all(map(operator.is_, _contents(after), self._given))

    def _values_after(self, state: Mapping[Tensor, dict[str, Any]]) -> list[dict[str, Any] | None]:
        """Returns what the step left for each piece."""
        of_each = zip(map(state.get, self._put_in), self._views, strict=True)
        return [None if after is None else apart(after, views) for after, views in of_each]

    def apply(self, written: torch.Event | None) -> list[ParameterState]:
        """Makes what was collected the optimizer's.

        Args:
            written: The event after the copies home; None where there are none yet.

        Returns:
            The states that have homes.
        """
        inners = [inner for inner in self._inners if inner is not None]
        for change in self._changes:
            if change.is_evicted:
                self._offload.resident.revoke(id(change.parameter))
            inner = self._state.of(change.parameter)
            inners.append(inner)
            for key, home in change.homes.items():
                inner.settle(key, home)
            for key, value in change.values.items():
                if key in inner.homes_by_key:
                    inner.forget(key)
                dict.__setitem__(inner, key, value)
            if list(dict.keys(inner)) != change.keys:
                for key in [k for k in dict.keys(inner) if k not in change.keys]:
                    inner.forget(key)
                inner.reorder(change.keys)
        at_home = [inner for inner in inners if inner.homes_by_key]
        for inner in at_home if written is not None else ():
            inner.written = written
        return at_home

    def check(self) -> None:
        """Hands on what the step left outside of the state.

        Raises:
            ResidencyError: The step coupled its parameters, or changed what all parts share.
        """
        assert self._shadow is not None
        self._shared.commit.add(self._shadow.outcome())

    def _shard(self, piece: Piece, value: Any) -> Any:
        """Returns a state as callers see it: what is as large as a parameter's shard is one."""
        if not isinstance(value, Tensor) or not self._is_local or value.dim() == 0:
            return value
        is_shard = value.shape == local_of(piece.parameter).shape
        return wrapped_like(value, piece.parameter) if is_shard else value

    @property
    def _views(self) -> list[dict[str, Tensor]]:
        """The states in the slot, of each piece by key, in dicts of their own."""
        return by_key(self._made, self.unit)

    def _states_before(self) -> dict[Tensor, dict[str, Any]]:
        """Returns the states that a step gets, by proxy; notes what they contain."""
        if self._is_plain and self._is_local and self.unit.are_whole:
            known = [inner for inner in self._inners if inner is not None]
            keys = [*map(len, known), *chain.from_iterable(map(dict.keys, known))]
            # Nothing but what is in the slot.
            if keys == self.unit.all_keys and len(known) == len(self._inners):
                self._given = [*self._put_in, *self.unit.all_keys, *self._made, _END]
                return dict(zip(self._put_in, self._views, strict=True))
        found: dict[Tensor, dict[str, Any]] = {}
        of_each = zip(self.unit.pieces, self._put_in, self._inners, self._views, strict=True)
        for piece, stand_in, inner, views in of_each:
            if inner is None:
                continue
            values = self._state_before(piece, inner, views)
            if values or piece.is_whole:
                found[stand_in] = values
        self._given = list(_contents(found))
        return found

    def _state_before(
        self, piece: Piece, inner: ParameterState, views: dict[str, Tensor]
    ) -> dict[str, Any]:
        """Returns what a step gets as a piece's state; notes the host's tensors in it, which it may
        change, with their values.
        """
        values: dict[str, Any] = {}
        for key, value in dict.items(inner):
            if key in views:
                values[key] = views[key] if self._is_local else wrapped_like(views[key], value)
            elif self.unit.sharded and is_sharded(value):
                local = local_of(value)
                values[key] = local if self._is_local else wrapped_like(local, value)
            elif not piece.is_last:
                # Pieces share what the host keeps (`step`): each advances a copy, but for the last,
                # which counts.
                values[key] = copy.deepcopy(value)
            else:
                values[key] = value
                if isinstance(value, Tensor) and value.is_cpu:
                    before = value.clone() if value.dim() else value.item()
                    self._host_before.append((value, before))
        if not self._is_plain and self._offload.has_master(piece.parameter):
            values.pop(MASTER, None)  # it is the proxy
        return values

    def _collect(self, piece: Piece, views: dict[str, Tensor], after: dict[str, Any]) -> None:
        inner = self._state.peek(piece.parameter)
        before_of: dict[str, Any] = {} if inner is None else inner
        if piece.parameter not in self._shared.making and _is_as_before(before_of, views, after):
            return  # changed in place, as nearly always
        making = self._shared.making.setdefault(piece.parameter, {})
        change = _Change(piece.parameter, keys=list(after))
        stays = self._stays(change, before_of, after)
        for key, value in after.items():
            view = views.get(key)
            before = dict.get(before_of, key, _MISSING) if view is None else view
            if value is before and not (change.is_evicted and _is_on_device(value)):
                continue
            if view is not None and _has_layout_of(value, view):
                if self._puts_in_slot(piece, inner, key, local_of(value), view):
                    continue
            elif stays or not _is_on_device(value):
                if piece.is_last:
                    change.values[key] = self._shard(piece, value)
                continue
            if piece.is_last or value.dim() > 0:
                self.fresh.append(self._give_home(piece, key, value, making))
        if piece.is_last:
            change.homes = {key: home for key, home in making.items() if key in after}
            self._changes.append(change)

    def _stays(self, change: _Change, before: dict[str, Any], after: dict[str, Any]) -> bool:
        """Returns whether what a step made on the device stays there; notes where it may not."""
        resident = self._offload.resident
        if change.parameter not in resident:
            return False
        if all(after[key] is dict.get(before, key) for key in after):
            return True
        here = [value for value in after.values() if _is_on_device(value)]
        stays = resident.allow(id(change.parameter), here)
        change.is_evicted = not stays
        return stays

    def _puts_in_slot(
        self, piece: Piece, inner: ParameterState | None, key: str, value: Tensor, view: Tensor
    ) -> bool:
        """Puts a state where it lay before, unless a caller holds its home."""
        if value.data_ptr() == view.data_ptr():
            return True
        # The step bound the key to a new tensor.
        if inner is not None and piece.is_whole and self._is_held(inner, key):
            return False
        view.copy_(value)
        return True

    def _is_held(self, inner: ParameterState, key: str) -> bool:
        """Returns whether a caller holds a key's home."""
        return inner.homes_by_key[key] in self._shared.held

    def _give_home(self, piece: Piece, key: str, value: Tensor, making: dict[str, Home]) -> Copy:
        is_cut = not piece.is_whole and value.dim() > 0
        shape = local_of(piece.parameter).shape if is_cut else value.shape
        if is_cut and (piece.stop is None or value.numel() != piece.stop - piece.start):
            raise ResidencyError(
                f"{self._offload.base.__name__}.step made a state {key!r} of shape "
                f"{tuple(value.shape)} for a cut of {piece.stop} elements, so it is "
                f"not element-wise. {MIDWAY}"
            )
        inner = self._state.peek(piece.parameter)
        home = making.get(key)
        is_at_home = home is None and inner is not None and key in inner.homes_by_key
        if inner is not None and is_at_home and not self._is_held(inner, key):
            home = inner.homes_by_key.get(key)
        if home is None:
            home = self._homes.reserved_for(piece.parameter).get(key)
        cut_shape = shape if is_cut else None
        if home is None or not self._homes.fits(home, value, cut_shape):
            owner = piece.parameter if is_cut else self._shard(piece, value)
            home = self._homes.allocate(value, cut_shape, shard_of=owner)
        making[key] = home
        buffer = raw_bytes(local_of(value))
        start = piece.start * value.element_size() if is_cut else 0
        region = home.region
        run = CopyRun(region.slab, region.offset + start, 0, buffer.numel())
        return buffer, [run] if buffer.numel() else []


def _is_as_before(
    before_of: dict[str, Any], views: dict[str, Tensor], after: dict[str, Any]
) -> bool:
    """Returns whether a step left the very values that it got, under the same keys."""
    return list(dict.keys(before_of)) == list(after) and all(
        value is (views[key] if key in views else dict.get(before_of, key))
        for key, value in after.items()
    )


def _is_on_device(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and not value.is_cpu


def _contents(state: Mapping[Tensor, dict[str, Any]]) -> Iterator[Any]:
    """Yields the objects of a state, to compare by identity."""
    inners = state.values()
    keys, values = chain.from_iterable(inners), chain.from_iterable(map(dict.values, inners))
    return chain(state, map(len, inners), keys, values, (_END,))


def _versions_of(tensors: Sequence[Tensor]) -> list[int]:
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # tensors of inference mode count none
        return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


def _has_layout_of(value: Any, view: Tensor) -> TypeGuard[Tensor]:
    return (
        isinstance(value, Tensor)
        and (local := local_of(value)).device == view.device
        and local.dtype == view.dtype
        and local.shape == view.shape
    )
