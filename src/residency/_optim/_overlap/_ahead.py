"""State that is on the device between two steps: it comes in under the backward pass, and leaves
under the next forward pass.

A unit that is here when its step comes needs no slot and no copy. What the step has written stays
until a trigger sends it home, and its homes are older meanwhile. Each look at homes goes through
``Homes.fence`` or ``ParameterState.fence``, which bring everything home first. Invariant, which
``tests/optim/test_overlap.py`` tries to break: a run has the bits of one without overlap, whatever
happens between its steps.

[Note: what a unit is] *Coming*, until its step lands the copies to the device; *stepped*, and newer
than its home; *leaving*, while the copies home read it. A unit that is coming or leaving is as at
home, and may be dropped at any time, in the order of the streams.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from residency import _device
from residency._optim._homes import Homes
from residency._optim._overlap import _blocks
from residency._optim._overlap._account import account_of
from residency._optim._overlap._schedule import Trigger, TriggerKind
from residency._optim._overlap._triggers import Triggers
from residency._optim._plan import Plan, Unit
from residency._optim._state import ParameterState
from residency._transfer import Flight, Mover
from residency._units import MIB

_logger = logging.getLogger("residency")
_MOST_LOOKS = 8  # at the allocator's blocks in one backward pass, each of which takes milliseconds
_NO_MILLISECONDS = 0.02  # a wait for copies that have ended
_GRAIN, _SEGMENT = 2 * MIB, 20 * MIB  # large segments are multiples; smaller blocks share one
_SHARE = 1.25  # of an equal part: a forward pass that is shorter than the one before still suffices


class Guest:
    """A unit of state that is on the device between steps. [Note: what a unit is]

    Attributes:
        unit: Which.
        slot: Its bytes there.
        coming: The copies to the device, until the step waits for them.
        inners: Whose homes are older than the slot, from the step until the copies home.
        is_entered: Whether a step writes the slot, or has failed in it.
        stays: Whether it goes home only when it must.
    """

    __slots__ = ("coming", "inners", "is_entered", "slot", "stays", "unit")

    def __init__(self, unit: Unit, slot: Tensor, *, stays: bool = False) -> None:
        self.stays = stays
        self.unit = unit
        self.slot = slot
        self.coming: Flight | None = None
        self.inners: list[ParameterState] = []
        self.is_entered = False

    def leave(self, inners: Iterable[ParameterState]) -> None:
        """Takes note that a step has written the slot, and made it newer than these homes."""
        self.inners = list(inners)
        self.is_entered = False


Waits = list[tuple[torch.Event, torch.Event, int]]
"""The events around each wait of a step for a guest, and its bytes."""


@dataclass(slots=True, eq=False)
class _Hole:
    """A block of the allocator's, and the units in it."""

    number: int
    memory: Tensor
    guests: list[Guest]


@dataclass(slots=True)
class Figures:
    """The bytes that an overlap has moved.

    Attributes:
        to_device_bytes: Copied to the device outside of a step.
        to_host_bytes: Copied home outside of a step.
        room_bytes: The room for state at the beginning of the newest step.
        here_bytes: State that was here then.
        hidden_bytes: Copied under the passes before it, both ways, without those dropped.
        dropped_bytes: Of these, copied to the device and given up before the step.
        beside_bytes: Copied at its begin and its end.
    """

    to_device_bytes: int = 0
    to_host_bytes: int = 0
    room_bytes: int = 0
    here_bytes: int = 0
    hidden_bytes: int = 0
    dropped_bytes: int = 0
    beside_bytes: int = 0
    _so_far: int = 0  # at the begin or the end of the newest step
    _num_dropped: int = 0

    def drop(self, num_bytes: int) -> None:
        """Counts bytes that came for nothing."""
        self._num_dropped += num_bytes

    def end_passes(self) -> None:
        """Takes the sums of the passes; a step begins."""
        self.dropped_bytes, self._num_dropped = self._num_dropped, 0
        self.hidden_bytes = self._since() - self.dropped_bytes

    def end_step(self) -> None:
        """Takes the sum of the moves beside the step, which is over."""
        self.beside_bytes = self._since()

    def _since(self) -> int:
        before, self._so_far = self._so_far, self.to_device_bytes + self.to_host_bytes
        return self._so_far - before


class Ahead:
    """The guests of one optimizer, and when they come and go.

    Attributes:
        account: That of the device.
        figures: See there.
    """

    _is_made = False  # of one that an interrupt left half made, which has nothing here

    def __init__(self, homes: Homes, *, keeps: bool = False) -> None:
        self._device = homes.device
        self._keeps = keeps
        self._kept: list[_Hole] = []  # with one unit in each
        self._num_steps = self._num_evaluations = 0
        self._homes = homes
        homes.ahead = weakref.ref(self)
        self._blocks: list[_Hole] = []
        self._plan: Plan | None = None
        self._num_looks = 0
        self._level_seen = 0
        self._share = 0
        self._num_forward = self._num_forward_before = 0
        self._num_backward = self._num_backward_before = 0
        self._has_told = False
        self._waits: deque[Waits] = deque(maxlen=2)
        self._late_bytes = 0
        self.account = account_of(homes.device)
        self._number = next(self.account.numbers)
        self._triggers = Triggers(self.at, self.account.numbers)
        self.figures = Figures()
        self.account.join(self)
        self._is_made = True

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self._is_made and (self._blocks or self._kept) and not is_finalizing():
            self._forget()

    @property
    def held_bytes(self) -> int:
        """The bytes of the blocks that are taken, and of the state that stays."""
        return self.passing_bytes + sum(block.memory.numel() for block in self._kept)

    @property
    def passing_bytes(self) -> int:
        """The bytes of the blocks that are taken."""
        return sum(block.memory.numel() for block in self._blocks)

    @property
    def kept_bytes(self) -> int:
        """The bytes of state that stays."""
        return sum(guest.unit.state_bytes for block in self._kept for guest in block.guests)

    @property
    def oldest(self) -> int | None:
        """The number of the block that was taken first."""
        return self._blocks[0].number if self._blocks else None

    @property
    def _guests(self) -> Iterator[Guest]:
        return (guest for block in (*self._kept, *self._blocks) for guest in block.guests)

    @property
    def _passing(self) -> Iterator[Guest]:
        return (guest for block in self._blocks for guest in block.guests)

    # ------------------------------------------------------------------------------------- triggers

    def at(self, trigger: Trigger) -> None:
        """Passes a trigger of this optimizer's on."""
        self.account.at(trigger, self)

    def forward_passes(self, mover: Mover) -> None:
        """Sends home the share of a module, whosever it is."""
        self._num_forward += 1
        self._num_looks = self._level_seen = 0
        self._send(self._passing, mover, self._share)

    def evaluation_begins(self, mover: Mover) -> None:
        """Gives up state that stays, as long as few evaluations have shown how far one goes."""
        self._num_evaluations += 1
        if self._kept:
            self._keep_at_most(self._room_to_keep(self._num_evaluations), mover)

    def gradient_arrives(self, trigger: Trigger, room: int, mover: Mover) -> None:
        """Brings units in, in the last backward pass before the step."""
        self._num_backward += trigger.number == self._triggers.first
        # Without forward passes nothing would take them home before the next ones come.
        if self._num_forward_before and self._num_backward + 1 >= self._num_backward_before:
            self._bring(room, mover)

    def stop(self) -> None:
        """Takes the hooks away."""
        self._triggers.close()

    # ------------------------------------------------------------------------------------- the step

    def step_begins(self, plan: Plan) -> dict[int, Guest]:
        """Returns the units of a plan that are here and may stay for its step, by ``id``."""
        if self.account.is_off or _device.current_stream(self._device).stream_id != 0:
            self.bring_home()
            return {}
        with self.account.moving() as mover:
            self.figures.end_passes()
            # A home has moved, another parameter has a gradient, or a step failed.
            if plan is not self._plan or any(guest.is_entered for guest in self._guests):
                self.drop_all(mover)
                self._triggers.watch([s.parameter for s in plan.seats if s.parameter is not None])
                self._plan = plan
            room = self.account.room_at(Trigger(TriggerKind.STEP_BEGINS, self._number))
            self._send(self._passing, mover)  # what a step that fails leaves is at home
            self.account.drop_to(room, mover)
            self._num_steps += 1
            self._keep(mover)
            self._follow_copies_home(mover)
            here = {id(guest.unit): guest for guest in self._guests}
            self.figures.room_bytes = room
            self.figures.here_bytes = sum(guest.unit.state_bytes for guest in here.values())
            if self._num_backward and not self._num_forward and not self._has_told:
                self._has_told = True
                _logger.warning(
                    "no module that has a parameter began a forward pass, or all are compiled, so "
                    "overlap=True changes nothing."
                )
            self._num_forward_before, self._num_forward = self._num_forward, 0
            self._num_backward_before, self._num_backward = self._num_backward, 0
            return here

    def late_bytes(self, waits: Waits) -> int:
        """Returns the bytes of guests to send home within a step: while others come too late, the
        other direction is free for as many.

        A step that sends them finds the next ones in time, so the number falls slowly, by a
        64th each time, until some are late again.

        Args:
            waits: Those of this step, which it adds as it goes; known at the step after the next.
        """
        known = self._waits[0] if len(self._waits) == 2 else []
        self._waits.append(waits)
        is_known = not known or known[-1][1].query()
        late = (n for begun, over, n in known if begun.elapsed_time(over) > _NO_MILLISECONDS)
        self._late_bytes = max(sum(late) if is_known else 0, self._late_bytes * 63 // 64)
        return self._late_bytes

    def step_is_over(self) -> None:
        """Keeps stepped units on the device, as far as there is room."""
        if self.account.is_off:
            return
        with self.account.moving() as mover:
            room = self.account.room_at(Trigger(TriggerKind.STEP_IS_OVER, self._number))
            self.account.drop_to(room, mover)
            left = sum(guest.unit.num_bytes for guest in self._passing if guest.inners)
            self.figures.end_step()
            self._share = int(_SHARE * left / max(self._num_forward_before, 1)) + 1

    # ---------------------------------------------------------------------------------------- moves

    def bring_home(self) -> None:
        """Queues the copies home of all that is newer here, and gives all memory back."""
        if self._blocks or self._kept:
            with self.account.moving() as mover:
                self.drop_all(mover)

    def _forget(self) -> None:
        """Gives all memory back, without a copy home: the state is gone."""
        self.account.join(self)  # which has forgotten it by now, and would take it for the run's
        with self.account.moving() as mover:
            for guest in self._guests:
                guest.inners = []
            self.drop_all(mover)

    def _send(self, guests: Iterable[Guest], mover: Mover, at_least: int | None = None) -> None:
        """Queues copies home, of at least so many bytes if there are; None sends all."""
        num_bytes = 0
        for guest in [each for each in guests if each.inners]:
            if at_least is not None and num_bytes >= at_least:
                break
            mover.follow_to_host()  # the step has written what goes home
            moves = (run.out_of(guest.slot) for run in guest.unit.stores)
            flight = mover.to_host(moves, [guest.slot])
            self._homes.newest = flight.event
            for inner in guest.inners:
                inner.written = flight.event
            guest.inners = []
            num_bytes += sum(run.num_bytes for run in guest.unit.stores)
        self.figures.to_host_bytes += num_bytes

    def _follow_copies_home(self, mover: Mover) -> None:
        """Makes copies to the device read homes behind the copies to them: the pieces of a cut
        parameter share a scalar's home, which the last one writes.
        """
        if self._homes.newest is not None:
            mover.follow_to_device(self._homes.newest)

    def drop_all(self, mover: Mover) -> None:
        """Gives all memory back, when what is newer in it has gone home."""
        self._keep_at_most(0, mover)
        while self._blocks:
            self.drop_oldest(mover)

    def drop_oldest(self, mover: Mover) -> None:
        """Gives the block back that was taken first, when what is newer in it has gone home."""
        self._drop(self._blocks, 0, mover)

    def _drop(self, blocks: list[_Hole], index: int, mover: Mover) -> None:
        block = blocks[index]
        self._send(block.guests, mover)
        for guest in block.guests:
            if guest.coming is not None:
                mover.land(guest.coming)  # what is freed next must not be written any more
                self.figures.drop(sum(run.num_bytes for run in guest.unit.loads))
        mover.let_go([block.memory])
        if blocks is self._kept:
            mover.follow_to_device()  # the lane has the memory back, behind all that used it
        del blocks[index]

    def _room_to_keep(self, num_seen: int) -> int:
        """Returns the room for this optimizer's state that stays, beside that of the others."""
        own = self.held_bytes - self.passing_bytes
        others = self.account.staying_bytes - own
        return self.account.reserve.room(self.account.level, num_seen) - others

    def _keep_at_most(self, room: int, mover: Mover) -> None:
        while self._kept and self.held_bytes - self.passing_bytes > room:
            self._drop(self._kept, -1, mover)

    def _keep(self, mover: Mover) -> None:
        """Gives units memory in which they stay, as far as the run will ever leave room, and gives
        up what has none.
        """
        if not self._keeps or self._plan is None or not self._plan.slot_bytes:
            return
        room = self._room_to_keep(self._num_steps)
        self._keep_at_most(room, mover)
        room -= self.held_bytes - self.passing_bytes + _SEGMENT
        if self._homes.held():
            return  # a caller may write into what he was shown
        kept = {id(guest.unit) for block in self._kept for guest in block.guests}
        for unit in self._plan.streamed:
            if id(unit) in kept or not unit.loads:
                continue
            room -= -(-self._plan.slot_bytes // _GRAIN) * _GRAIN
            memory = self.account.reserve.take(self._plan.slot_bytes) if room >= 0 else None
            if memory is None:
                return
            self._leave_block(unit, mover)
            self._load([unit], memory, self._plan.slot_bytes, mover, stays=True)

    def _leave_block(self, unit: Unit, mover: Mover) -> None:
        """Takes a unit that is at home out of the block that it is in, if it is in one."""
        for block in self._blocks:
            for guest in [each for each in block.guests if each.unit is unit]:
                if guest.coming is not None:
                    mover.land(guest.coming)  # the block may be given back any time
                block.guests.remove(guest)

    def _bring(self, room: int, mover: Mover) -> None:
        """Takes free blocks and queues the copies of units into them, as far as there is room."""
        if self._plan is None or self._num_looks >= _MOST_LOOKS:
            return
        slot_bytes = self._plan.slot_bytes
        # What has no room at the step would have come for nothing.
        room = min(room, self.figures.room_bytes) - self.account.passing_bytes
        level = self.account.level
        is_new = abs(level - self._level_seen) >= max(slot_bytes, room // _MOST_LOOKS)
        if not slot_bytes or room < slot_bytes or not is_new:
            return
        self._num_looks, self._level_seen = self._num_looks + 1, level
        if self._homes.held():
            return  # a caller may write into what he was shown
        here = {id(guest.unit) for guest in self._guests}
        away = [unit for unit in self._plan.streamed if id(unit) not in here and unit.loads]
        sizes = _blocks.free_blocks(self._device, slot_bytes) if away else {}
        while away:
            address = _blocks.largest(sizes, room)
            if address is None:
                return
            size = sizes.pop(address)
            memory = _blocks.take(self._device, address, size)
            if memory is None:
                return
            units, away = away[: size // slot_bytes], away[size // slot_bytes :]
            self._load(units, memory, slot_bytes, mover)
            room -= size

    def _load(
        self,
        units: Sequence[Unit],
        memory: Tensor,
        slot_bytes: int,
        mover: Mover,
        *,
        stays: bool = False,
    ) -> None:
        slots = [memory.narrow(0, i * slot_bytes, slot_bytes) for i in range(len(units))]
        block = _Hole(next(self.account.numbers), memory, [])
        (self._kept if stays else self._blocks).append(block)
        mover.follow_to_device()
        self._send(self._passing, mover)
        self._follow_copies_home(mover)
        for unit, slot in zip(units, slots, strict=True):
            guest = Guest(unit, slot, stays=stays)
            guest.coming = mover.to_device(run.into(slot) for run in unit.loads)
            block.guests.append(guest)
            self.figures.to_device_bytes += sum(run.num_bytes for run in unit.loads)
