"""The step: for each unit, state to the device, the optimizer's own step, state home.

Three streams (current, h2d, d2h) and events, never a wait on the host. Slots are allocated on the
current stream, because memory that a side stream allocates is a pool of its own; they are dropped
at the end of the step, behind the last copy that reads them.

[Note: the waits of a step] h2d waits until a slot is allocated (``born``: the memory may have
readers from before) and, when it is used again, until its copy home is done (the gate). The shadow
step waits for its copies to the device (``ready``). d2h waits for the shadow step (``done``).
Whatever d2h reads passes the gate before it is dropped. A later step's h2d waits for this step's
d2h, because ``born`` follows that wait.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from residency import _device
from residency._errors import RefusedError, ResidencyError
from residency._optim._homes import Home, Homes
from residency._optim._masters import MASTER, take_foreign_writes, versions_of
from residency._optim._offload_data import Offload
from residency._optim._plan import Member, Piece, Plan, Unit, lay_out
from residency._optim._shadow import (
    Commit,
    Outcome,
    is_torchs_own,
    quiet_global_hooks,
    shadow_step,
)
from residency._optim._sharding import has_partial_gradient, local_gradient
from residency._optim._state import ParameterState, State
from residency._optim._statistics import Timeline
from residency._transfer import Run, is_sharded, lending, local_of, wrapped_like
from residency._transfer._lanes import raw_bytes

_Copy = tuple[Tensor, Sequence[Run]]
_MISSING = object()


def members_with_gradient(optimizer: Optimizer) -> list[Member]:
    """Returns the parameters that this step changes, in group order.

    Raises:
        RefusedError: A gradient is sparse.
    """
    members = []
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if parameter.grad.layout is not torch.strided:
                raise RefusedError(
                    f"a parameter of shape {tuple(parameter.shape)} has a gradient of layout "
                    f"{parameter.grad.layout}; an offloaded optimizer takes dense gradients only. "
                    "Nothing was stepped: use `sparse=False`, or onload_optimizer first."
                )
            members.append(Member(index, parameter))
    return members


class StreamedStep:
    """Runs one step of an offloaded optimizer."""

    def __init__(self, optimizer: Optimizer, offload: Offload, homes: Homes, state: State) -> None:
        self._optimizer = optimizer
        self._offload = offload
        self._homes = homes
        self._lanes = homes.lanes
        self._gate = homes.gate
        self._state = state
        self._current = _device.current_stream(homes.device)
        self._commit = Commit(optimizer)
        self._alive: deque[list[Tensor]] = deque()
        self._num_parts_left = 0
        self._num_births_alive = offload.num_slots
        self._is_foreign = False
        self._timeline = Timeline()
        self._gradients: dict[Tensor, Tensor] = {}
        self._left_homes: dict[Tensor, list[Home]] = {}
        self._is_local = offload.is_local

    def run(self) -> None:
        """Steps every parameter that has a gradient, then commits group values and attributes."""
        members = members_with_gradient(self._optimizer)
        for member in members:
            inner = self._state.peek(member.parameter)
            if inner is not None:
                inner.check_parameter(member.parameter)
            if inner is not None and inner.template is not None:
                _forget_template(inner, self._homes)
        is_template = not self._state and _has_no_rate(self._optimizer)
        if is_template:
            self._num_births_alive = 1
        plan = self._offload.plan_for(self._optimizer, members, is_template=is_template)
        self._reserve_homes(plan)
        num_parts = bool(plan.resident) + len(plan.streamed) + len(plan.births)
        self._num_parts_left = max(num_parts, 1)
        with quiet_global_hooks():
            try:
                if self._offload.is_local:
                    # In group order on every rank, before plans, which may differ, have a say.
                    self._gradients = {
                        m.parameter: local_gradient(m.parameter)
                        for m in members
                        if is_sharded(m.parameter)
                    }
                self._step_streamed(plan)
                self._step_births(plan)
                if not members:  # counters in groups advance without gradients too
                    self._shadow((), [], None)
            except BaseException:
                # Slots may be filling for units that will not be stepped now.
                self._current.wait_event(self._lanes.mark(self._lanes.h2d))
                raise
            finally:
                self._drop_alive(keep=0)
        self._commit.write()
        self._offload.num_steps += 1
        self._offload.timeline = self._timeline
        self._offload.num_buckets = len(plan.streamed) + len(plan.births)

    def _reserve_homes(self, plan: Plan) -> None:
        """Makes the homes for all state that this step makes, before any parameter is stepped: a
        host without room then leaves everything as it was.
        """
        for piece in (piece for unit in plan.births for piece in unit.pieces if piece.is_last):
            member = Member(piece.group_index, piece.parameter)
            schema = self._offload.schema_of(self._optimizer, member)
            if schema is not None:
                self._homes.reserve(piece.parameter, schema.device)

    def _step_streamed(self, plan: Plan) -> None:
        units = plan.streamed
        num_slots = min(self._offload.num_slots, len(units))
        slots = [self._allocate(plan.slot_bytes) for _ in range(num_slots)]
        self._alive.append(slots)
        self._offload.slot_bytes = plan.slot_bytes
        self._allow_h2d()
        ready = {i: self._load(units[i], slots[i]) for i in range(num_slots)}
        if plan.resident:
            self._step_unit(Unit(plan.resident, [{} for _ in plan.resident]), None)
        for index, unit in enumerate(units):
            slot = slots[index % num_slots]
            self._await(ready.pop(index))
            born = self._step_unit(unit, slot)
            if born:  # rare, and beyond the slots: they go before the next unit makes more
                self._gate.before_free(born)
                del born
            following = index + num_slots
            if following < len(units):
                ready[following] = self._load(units[following], slot)

    def _step_births(self, plan: Plan) -> None:
        if plan.births:
            # The bound counts buffers of both kinds: the slots go before the first birth.
            self._drop_alive(keep=0)
        for unit in plan.births:
            self._drop_alive(keep=self._num_births_alive - 1)
            slot = self._allocate(unit.num_bytes)
            self._allow_h2d()
            self._await(self._load(unit, slot))
            self._alive.append([slot, *self._step_unit(unit, slot)])
            if self._num_births_alive == 1:
                self._drop_alive(keep=0)

    def _allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._homes.device)

    def _allow_h2d(self) -> None:
        born = self._lanes.mark(self._current)
        self._lanes.h2d.wait_event(born)

    def _load(self, unit: Unit, slot: Tensor) -> torch.Event | None:
        if not unit.loads:
            return None
        self._gate.before_write([slot], stream=self._lanes.h2d)
        num_bytes = sum(run.num_bytes for run in unit.loads)
        self._offload.copied_to_device_bytes += num_bytes
        begun = self._lanes.mark(self._lanes.h2d)
        ready = self._lanes.load(slot, unit.loads)
        self._timeline.loads.append((begun, ready, num_bytes))
        return ready

    def _await(self, ready: torch.Event | None) -> None:
        if ready is not None:
            begun = self._lanes.mark(self._current)
            self._current.wait_event(ready)
            self._timeline.stalls.append((begun, self._lanes.mark(self._current)))

    def _drop_alive(self, *, keep: int) -> None:
        if len(self._alive) <= keep:
            return
        begun = self._lanes.mark(self._current)
        while len(self._alive) > keep:
            self._gate.before_free(self._alive[0])
            self._alive.popleft()
        self._timeline.stalls.append((begun, self._lanes.mark(self._current)))

    def _step_unit(self, unit: Unit, slot: Tensor | None) -> list[Tensor]:
        """Steps one unit and queues its copies home; returns the new tensors that those copies
        read.
        """
        views = _views_in(slot, unit)
        self._gate.before_write(self._written_in_place(unit))
        outcome, proxies = self._shadow(unit.pieces, views, slot)
        births: list[_Copy] = []
        for piece, proxy, each in zip(unit.pieces, proxies, views, strict=True):
            after = outcome.state.get(proxy)
            if self._offload.has_master(piece.parameter):
                after = {MASTER: self._round(piece, proxy), **(after or {})}
            if after is not None:
                self._collect(piece, each, after, births)
        copies = [*births]
        stores = self._stores_of(unit)
        if slot is not None and stores:
            copies.append((slot, stores))
        if copies:
            self._store(unit, copies)
        return [buffer for buffer, _ in births]

    def _written_in_place(self, unit: Unit) -> Iterator[Tensor]:
        for piece in unit.pieces:
            yield local_of(piece.parameter)
            inner = self._state.peek(piece.parameter)
            if inner is not None and inner.is_resident:
                yield from (local_of(v) for v in dict.values(inner) if isinstance(v, Tensor))

    def _stores_of(self, unit: Unit) -> Sequence[Run]:
        """Returns the copies home of a unit: off the homes that a save reads.

        The bytes on their way to the device are still read from the old homes, of which a cut's
        parameter needs the rest in later units, so those stay until the step ends.
        """
        if not (lending or self._left_homes):
            return unit.stores
        is_moved = False
        for piece in unit.pieces:
            inner = self._state.peek(piece.parameter)
            for key, home in list(inner.homes_by_key.items()) if inner is not None else ():
                writable = self._homes.writable(home)
                if writable is not home:
                    assert inner is not None
                    self._left_homes.setdefault(piece.parameter, []).append(home)
                    inner.settle(key, writable)
            is_moved = is_moved or piece.parameter in self._left_homes
        return lay_out(unit.pieces, self._state).stores if is_moved else unit.stores

    def _store(self, unit: Unit, copies: Sequence[_Copy]) -> None:
        self._lanes.d2h.wait_event(self._lanes.mark(self._current))
        begun = self._lanes.mark(self._lanes.d2h)
        written = self._lanes.store(copies)
        num_bytes = sum(run.num_bytes for _, runs in copies for run in runs)
        self._timeline.stores.append((begun, written, num_bytes))
        self._gate.reading([buffer for buffer, _ in copies], written, self._lanes.d2h)
        self._homes.newest = written
        for piece in unit.pieces:
            inner = self._state.peek(piece.parameter)
            if inner is not None and inner.homes_by_key:
                inner.written = written
        self._offload.copied_to_host_bytes += num_bytes

    def _shadow(
        self, pieces: Sequence[Piece], views: Sequence[dict[str, Tensor]], slot: Tensor | None
    ) -> tuple[Outcome, list[Tensor]]:
        groups = [{**group, "params": []} for group in self._optimizer.param_groups]
        state: dict[Tensor, dict[str, Any]] = {}
        proxies = []
        # One step takes shards or local tensors: torch's loops over several cannot mix them.
        self._is_local = self._offload.is_local and not any(
            piece.is_whole and has_partial_gradient(piece.parameter) for piece in pieces
        )
        for piece, each in zip(pieces, views, strict=True):
            proxy = self._proxy(piece, each)
            proxies.append(proxy)
            groups[piece.group_index]["params"].append(proxy)
            values = self._state_before(piece, each)
            if values or (piece.is_whole and self._state.peek(piece.parameter) is not None):
                state[proxy] = values
        self._num_parts_left -= 1
        is_copied = self._num_parts_left > 0 and not is_torchs_own(self._offload.base)
        outcome = shadow_step(self._optimizer, self._offload.base, groups, state, is_copied)
        self._commit.add(outcome)
        return outcome, proxies

    def _proxy(self, piece: Piece, views: dict[str, Tensor]) -> Tensor:
        """Returns what the shadow steps in a parameter's place, with its gradient."""
        parameter = piece.parameter
        has_master = self._offload.has_master(parameter)
        if not has_master and piece.is_whole and not (self._is_local and is_sharded(parameter)):
            return parameter
        proxy = self._master(piece, views) if has_master else self._low(piece)
        gradient = self._gradient_of(piece)
        proxy.requires_grad_(parameter.requires_grad)
        proxy.grad = gradient.float() if has_master else gradient
        return proxy

    def _gradient_of(self, piece: Piece) -> Tensor:
        """Returns the gradient that a step sees: of the local tensor, cut as the piece is, or of
        the whole shard.
        """
        parameter = piece.parameter
        assert parameter.grad is not None
        if not self._is_local:
            return parameter.grad.detach()
        gradient = self._gradients.get(parameter, parameter.grad).detach()
        return gradient if piece.is_whole else gradient.reshape(-1)[piece.start : piece.stop]

    def _master(self, piece: Piece, views: dict[str, Tensor]) -> Tensor:
        """Returns a piece's master, with what others wrote into the parameter taken over."""
        parameter, low = piece.parameter, self._low(piece)
        inner = self._state.of(parameter)
        if piece.start == 0:  # stepping the first piece changes the versions
            self._is_foreign = inner.master_versions != versions_of(parameter)
        master = views.get(MASTER)
        if master is None and inner.is_resident and MASTER in inner:
            master = local_of(dict.__getitem__(inner, MASTER)).detach()
        if master is None:
            master = low.float()
        elif self._is_foreign:
            take_foreign_writes(master, low)
        return master if self._is_local else wrapped_like(master, parameter)

    def _low(self, piece: Piece) -> Tensor:
        low = local_of(piece.parameter).detach()
        return low if piece.is_whole else low.view(-1)[piece.start : piece.stop]

    def _round(self, piece: Piece, proxy: Tensor) -> Tensor:
        """Writes a stepped master to its parameter; returns it as a state."""
        proxy.grad = None
        master = proxy.detach()
        self._low(piece).copy_(local_of(master))
        if piece.is_last:
            self._state.of(piece.parameter).master_versions = versions_of(piece.parameter)
        return master

    def _seen(self, local: Tensor, value: Tensor) -> Tensor:
        """Returns a state as the step sees it, which steps local tensors or shards."""
        return local if self._is_local else wrapped_like(local, value)

    def _shard(self, piece: Piece, value: Any) -> Any:
        """Returns a state as callers see it: what is as large as a parameter's shard is one."""
        if not isinstance(value, Tensor) or not self._is_local or value.dim() == 0:
            return value
        is_shard = value.shape == local_of(piece.parameter).shape
        return wrapped_like(value, piece.parameter) if is_shard else value

    def _state_before(self, piece: Piece, views: dict[str, Tensor]) -> dict[str, Any]:
        inner = self._state.peek(piece.parameter)
        values: dict[str, Any] = {}
        for key, value in dict.items(inner) if inner is not None else ():
            if key == MASTER and self._offload.has_master(piece.parameter):
                continue  # it is the proxy
            if key in views:
                values[key] = self._seen(views[key], value)
            elif inner is not None and key in inner.homes_by_key:
                continue  # made by an earlier piece in this very step
            elif is_sharded(value):
                values[key] = self._seen(local_of(value), value)
            else:
                # Pieces share what the host keeps (`step`): each advances a copy, the last one
                # counts.
                values[key] = value if piece.is_whole else copy.deepcopy(value)
        return values

    def _collect(
        self,
        piece: Piece,
        views: dict[str, Tensor],
        after: dict[str, Any],
        births: list[_Copy],
    ) -> None:
        inner = self._state.of(piece.parameter)
        for key, value in after.items():
            view = views.get(key)
            before = dict.get(inner, key, _MISSING) if view is None else view
            if value is before:
                continue  # changed in place, as nearly always
            local = local_of(value) if isinstance(value, Tensor) else value
            if view is not None and _has_layout_of(local, view):
                if local.data_ptr() != view.data_ptr():  # the step bound the key to a new tensor
                    view.copy_(local)
            elif isinstance(value, Tensor) and not value.is_cpu and not inner.is_resident:
                if piece.is_last or value.dim() > 0:
                    births.append(self._give_home(piece, key, value))
            elif piece.is_last:
                if key in inner.homes_by_key:
                    inner.forget(key)
                dict.__setitem__(inner, key, self._shard(piece, value))
        if piece.is_last and list(dict.keys(inner)) != list(after):
            for key in [k for k in dict.keys(inner) if k not in after]:
                inner.forget(key)
            inner.reorder(list(after))

    def _give_home(self, piece: Piece, key: str, value: Tensor) -> _Copy:
        inner = self._state.of(piece.parameter)
        is_cut = not piece.is_whole and value.dim() > 0
        shape = local_of(piece.parameter).shape if is_cut else value.shape
        if is_cut and (piece.stop is None or value.numel() != piece.stop - piece.start):
            raise ResidencyError(
                f"{self._offload.base.__name__}.step made a state {key!r} of shape "
                f"{tuple(value.shape)} for a cut of {piece.stop} elements; it is not element-wise."
            )
        home: Home | None = inner.homes_by_key.get(key)
        if home is None:
            home = inner.reserved.get(key)
        cut_shape = shape if is_cut else None
        if home is None or not self._homes.fits(home, value, cut_shape):
            owner = piece.parameter if is_cut else self._shard(piece, value)
            home = self._homes.allocate(value, cut_shape, shard_of=owner)
        inner.settle(key, home)
        buffer = raw_bytes(local_of(value))
        start = piece.start * value.element_size() if is_cut else 0
        region = home.region
        run = Run(region.slab, region.offset + start, 0, buffer.numel())
        return buffer, [run] if buffer.numel() else []


def _views_in(slot: Tensor | None, unit: Unit) -> list[dict[str, Tensor]]:
    """Returns the states of a unit as views of its slot, for each piece by key."""
    if slot is None:
        return [{} for _ in unit.pieces]
    dtypes = {view.dtype for each in unit.views for view in each.values()}
    # Entries and slots are aligned to more than any itemsize.
    typed = {dtype: slot.view(dtype) for dtype in dtypes}
    return [{key: view.of(typed[view.dtype]) for key, view in each.items()} for each in unit.views]


def _has_no_rate(optimizer: Optimizer) -> bool:
    """Says whether all learning rates are zero: how ``torch.distributed.checkpoint`` makes the
    state of a fresh optimizer before a load. Rates on the device are not looked at.
    """
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if rate is None or (isinstance(rate, Tensor) and not rate.is_cpu) or rate != 0:
            return False
    return True


def _forget_template(inner: ParameterState, homes: Homes) -> None:
    """Makes a primed state what it was before, unless a load has written into it."""
    if inner.is_template():
        kept = dict(inner.homes_by_key)
        inner.clear()
        inner.reserved.update(kept)
        homes.version += 1
    inner.template = None


def _has_layout_of(value: Any, view: Tensor) -> bool:
    return (
        isinstance(value, Tensor)
        and value.device == view.device
        and value.dtype == view.dtype
        and value.shape == view.shape
    )
