"""The step: for each unit, state to the device, the optimizer's own step, state home.

Three streams (current, h2d, d2h) and events, never a wait on the host. Slots are allocated on the
current stream, because memory that a side stream allocates is a pool of its own; they are dropped
at the end of the step, behind the last copy that reads them.

[Note: the waits of a step] h2d waits until a slot is allocated (the memory may have readers from
before) and, when it is used again, until its copy home is done (the gate). The shadow step waits
for its copies to the device. d2h waits for the shadow step. Whatever d2h reads passes the gate
before it is dropped. A later step's h2d waits for this step's d2h, because the slots that it waits
for are allocated behind that; of units that stay longer than a step, ``_overlap`` orders it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor
from torch.optim import Optimizer

from residency import _device
from residency._dtensor import local_gradient, sharded_among
from residency._nesting import half_done
from residency._optim._company import company_of
from residency._optim._homes import Home, Homes
from residency._optim._offload_record import Offload
from residency._optim._overlap import Guest, Waits
from residency._optim._plan import Member, Plan, Unit, homes_of, lay_out, members_with_gradient
from residency._optim._progress import Progress
from residency._optim._stand_ins import StandIns
from residency._optim._states import State
from residency._optim._statistics import Timeline
from residency._optim._trial._partial_step import Commit
from residency._optim._trial._step_call import StepCall
from residency._optim._unit_step import Copy, Shared, UnitStep
from residency._optim._validate import has_no_rate
from residency._transfer import CopyRun, Flight, Mover, lending


class StreamedStep:
    """One step of an offloaded optimizer."""

    def __init__(
        self, optimizer: Optimizer, offload: Offload, homes: Homes, state: State, call: StepCall
    ) -> None:
        self._optimizer = optimizer
        self._offload = offload
        self._homes = homes
        self._mover = Mover(homes.device)
        self._ahead = offload.on_host.ahead
        self._late_bytes = 0
        self._state = state
        self._shared = Shared(
            optimizer, offload, homes, state, Commit(optimizer), StandIns(offload, state), call
        )
        self._progress = Progress(())
        self._alive: deque[list[Tensor]] = deque()
        self._num_units = -1
        self._num_done = 0
        self._num_fresh_alive = offload.num_slots
        self._timeline = Timeline()
        self._moved: dict[Home, Home] = {}  # from those that a save reads
        self._left_homes: dict[Tensor, list[tuple[Home, Home]]] = {}
        self._num_steps_before = offload.num_steps

    @half_done("a step of an offloaded optimizer")
    def run(self) -> None:
        """Steps every parameter that has a gradient, then commits group values and attributes."""
        members = members_with_gradient(self._optimizer)
        layouts = self._offload.layouts_of(members)
        inners = self._state.peek_each(members.parameters)
        is_shown = self._homes.is_shown
        for inner, layout in zip(inners, layouts, strict=True):
            if inner is None:
                continue
            if inner.made_for != layout:
                inner.check_layout(layout)
            if is_shown:
                inner.require_in_place()
            if inner.template is not None:
                inner.forget_template()
        is_template = not self._state and has_no_rate(self._optimizer)
        if is_template:
            self._num_fresh_alive = 1
        try:
            plan = self._offload.plan_for(self._optimizer, members, inners, is_template=is_template)
            self._progress = Progress(members.parameters)
            if not (self._offload.master_weights or plan.is_one_list):
                base = self._offload.base
                self._shared.company = company_of(self._optimizer, base, members, inners)
            self._shared.held = set(self._homes.held())
            self._take(plan)
            self._finish(plan)
            if self._shared.held or self._homes.held():  # [Note: what callers hold]
                self._homes.fence()
            if self._ahead is not None:
                self._ahead.step_is_over()
        except BaseException as error:
            self._stop()
            if self._num_done == self._num_units:
                self._finish(plan)
            self._progress.tell(error)
            raise
        finally:
            self._offload.leave_plan()

    def _finish(self, plan: Plan) -> None:
        """Makes group values, attributes and figures those after the step."""
        self._shared.commit.write()
        self._offload.num_steps = self._num_steps_before + 1
        self._offload.timeline = self._timeline
        self._offload.num_buckets = len(plan.streamed) + len(plan.fresh)

    def _stop(self) -> None:
        """Waits for the lanes after a failure, and completes what they were to complete."""
        self._mover.settle()  # slots go back to the allocator, and the host reads the homes
        self._alive.clear()
        if self._ahead is not None:
            self._ahead.bring_home()
        for parameter, moved in self._left_homes.items():
            if self._progress.is_stepped(parameter):
                continue
            start = self._progress.num_elements(parameter)
            for old, new in moved:
                if start and new.tensor.dim() > 0:  # a cut's
                    new.tensor.view(-1)[start:] = old.tensor.view(-1)[start:]
                else:
                    new.tensor.copy_(old.tensor)

    def _take(self, plan: Plan) -> None:
        """Steps the units of a plan."""
        self._reserve_homes(plan)
        num_units = bool(plan.resident.pieces) + len(plan.streamed) + len(plan.fresh)
        self._num_units = max(num_units, 1)
        if self._offload.is_local:
            # In group order on every rank, before plans, which may differ, have a say.
            sharded = sharded_among(self._progress.parameters)
            self._shared.stand_ins.gradients = {p: local_gradient(p) for p in sharded}
        self._step_streamed(plan)
        self._step_fresh(plan)  # last, when the slots are gone: these steps make their state
        if not num_units:  # counters in groups advance without gradients too
            self._step_unit(Unit(()), None)
        self._drop_alive(num_left=0)

    def _reserve_homes(self, plan: Plan) -> None:
        """Makes the homes for all state that this step makes, before any parameter is stepped: a
        host without room then leaves everything as it was.
        """
        for piece in (piece for unit in plan.fresh for piece in unit.pieces if piece.is_last):
            member = Member(piece.group_index, piece.parameter)
            schema = self._offload.schema_of(self._optimizer, member)
            if schema is not None:
                self._homes.reserve(piece.parameter, schema.device)

    def _step_streamed(self, plan: Plan) -> None:
        here: dict[int, Guest] = {}
        waits: Waits = []
        if self._ahead is not None:
            here = self._ahead.step_begins(plan)
            self._late_bytes = self._ahead.late_bytes(waits)
        units = [unit for unit in plan.streamed if id(unit) not in here]
        num_slots = min(self._offload.num_slots, len(units))
        slots = [self._allocate(plan.slot_bytes) for _ in range(num_slots)]
        self._alive.append(slots)
        self._offload.slot_bytes = plan.slot_bytes
        self._mover.follow_to_device()
        ready = {i: self._load(units[i], slots[i]) for i in range(num_slots)}
        if plan.resident.pieces:
            self._drop(self._step_unit(plan.resident, None))
        index = 0
        for unit in plan.streamed:
            if guest := here.get(id(unit)):
                if guest.coming is not None:
                    self._await(guest.coming)
                    if not guest.stays:
                        waits.append((*self._timeline.stalls[-1], unit.num_bytes))
                guest.coming, guest.is_entered = None, True
                self._mover.before_write([guest.slot])  # its last copies home may read it
                self._drop(self._step_unit(unit, guest.slot, guest))
                continue
            slot = slots[index % num_slots]
            self._await(ready.pop(index))
            # Rare, and beyond the slots: they go before the next unit makes more.
            self._drop(self._step_unit(unit, slot))
            following = index + num_slots
            if following < len(units):
                ready[following] = self._load(units[following], slot)
            index += 1

    def _drop(self, buffers: list[Tensor]) -> None:
        """Frees buffers that copies home read."""
        if buffers:
            self._mover.let_go(buffers)
            buffers.clear()

    def _step_fresh(self, plan: Plan) -> None:
        if plan.fresh:
            # The bound counts buffers of both kinds: slots go before the first fresh one.
            self._drop_alive(num_left=0)
        for unit in plan.fresh:
            # One that has state, and makes more, goes alone: it is rare, and takes the most.
            self._drop_alive(num_left=0 if unit.loads else self._num_fresh_alive - 1)
            slot = self._allocate(unit.num_bytes)
            self._mover.follow_to_device()
            self._await(self._load(unit, slot))
            self._alive.append([slot, *self._step_unit(unit, slot)])
            if self._num_fresh_alive == 1:
                self._drop_alive(num_left=0)

    def _allocate(self, num_bytes: int) -> Tensor:
        return _device.unfilled_bytes(num_bytes, self._homes.device)

    def _load(self, unit: Unit, slot: Tensor) -> Flight | None:
        if not unit.loads:
            return None
        moves = (run.into(slot) for run in unit.loads)
        flight = self._mover.to_device(moves, over=[slot], timed=True)
        num_bytes = sum(run.num_bytes for run in unit.loads)
        self._offload.copied_to_device_bytes += num_bytes
        self._timeline.loads.append((flight, num_bytes))
        return flight

    def _await(self, flight: Flight | None) -> None:
        if flight is not None:
            begun = self._mover.mark()
            self._mover.land(flight)
            self._timeline.stalls.append((begun, self._mover.mark()))

    def _drop_alive(self, *, num_left: int) -> None:
        if len(self._alive) <= num_left:
            return
        begun = self._mover.mark()
        while len(self._alive) > num_left:
            self._mover.let_go(self._alive[0])
            self._alive.popleft()
        self._timeline.stalls.append((begun, self._mover.mark()))

    def _step_unit(
        self, unit: Unit, slot: Tensor | None, guest: Guest | None = None
    ) -> list[Tensor]:
        """Steps one unit and queues its copies home, or leaves them to the guest that it is;
        returns the new tensors that those copies read.

        What the optimizer's own step has changed is followed up, though an exception comes between.
        """
        step = UnitStep(self._shared, unit, slot, number=self._num_done + 1, of=self._num_units)
        if guest is not None and guest.inners:
            step.watch_slot()
        self._mover.before_write(step.written)
        try:
            self._progress.begun = unit.pieces
            step.step()
            self._publish(step, guest)
        except BaseException:
            if step.is_stepped:
                self._publish(step, guest)
            else:
                self._progress.begun = step.roll_back()
            raise
        return [buffer for buffer, _ in step.fresh]

    def _publish(self, step: UnitStep, guest: Guest | None) -> None:
        """Sends a stepped unit's state home and makes it the optimizer's; may be done twice."""
        if step.stores is None:
            step.stores = self._stores_of(step.unit)
        if not step.is_collected:
            step.collect()
        copies = [*step.fresh]
        is_whole = not copies and step.stores is step.unit.stores
        stays = guest is not None and is_whole and (guest.stays or self._late_bytes <= 0)
        if step.slot is not None and step.stores and not stays:
            copies.append((step.slot, step.stores))
        written = self._store(copies) if copies else None
        inners = step.apply(written)
        if guest is not None and is_whole:
            guest.leave(inners if stays else ())
            self._late_bytes -= 0 if guest.stays else step.unit.num_bytes
        elif guest is not None:
            guest.inners = []  # it has gone home, and goes at the next step
        self._progress.add(step.unit.pieces)
        step.check()
        self._num_done = step.number

    def _stores_of(self, unit: Unit) -> Sequence[CopyRun]:
        """Returns the copies home of a unit: off the homes that a save reads.

        The bytes on their way to the device are still read from the old homes, of which a cut's
        parameter needs the rest in later units, so those stay until the step ends.
        """
        if not (lending or self._moved):
            return unit.stores
        if not self._moved and not self._may_be_lent(unit):
            return unit.stores  # a snapshot that is kept has earlier homes
        homes = homes_of(unit.pieces, self._state)
        for piece, by_key in zip(unit.pieces, homes, strict=True):
            inner = self._state.peek(piece.parameter)
            for key, home in by_key.items():
                assert inner is not None
                if home not in self._moved and (another := self._homes.writable(home)) is not home:
                    self._moved[home] = another
                if home in self._moved:
                    pair = (home, self._moved[home])
                    self._left_homes.setdefault(piece.parameter, []).append(pair)
                    inner.settle(key, self._moved[home])
        after = homes_of(unit.pieces, self._state)
        arrived = set(self._moved.values())
        is_moved = any(home in arrived for by_key in after for home in by_key.values())
        return lay_out(unit.pieces, after).stores if is_moved else unit.stores

    def _may_be_lent(self, unit: Unit) -> bool:
        """Returns whether a snapshot or a save may read homes of a unit; asked of all at every
        step while anything is lent.
        """
        inners = self._state.peek_each([piece.parameter for piece in unit.pieces])
        by_keys = [inner.homes_by_key for inner in inners if inner is not None]
        homes = list(chain.from_iterable(map(dict.values, by_keys)))
        return lending.is_any_lent([home.tensor for home in homes])

    def _store(self, copies: Sequence[Copy]) -> torch.Event:
        self._mover.follow_to_host()  # the step has written what goes home
        moves = (run.out_of(buffer) for buffer, runs in copies for run in runs)
        flight = self._mover.to_host(moves, [buffer for buffer, _ in copies], timed=True)
        num_bytes = sum(run.num_bytes for _, runs in copies for run in runs)
        self._timeline.stores.append((flight, num_bytes))
        self._homes.newest = flight.event
        self._offload.copied_to_host_bytes += num_bytes
        return flight.event
