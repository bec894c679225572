"""The few units that are on the device at once, and the next one on its way.

Two rules order everything. The computing stream waits for a unit's copy before it reads the bytes;
the lane waits for all streams that read them before the bytes become another unit's. Invariant,
which ``tests/frozen/test_waits.py`` tries to break: no wait is on the host, and without either rule
a run is a race.

[Note: one pool] Storages get their bytes on the lane to the device, and all have the size of the
largest unit. So the allocator keeps as many equal blocks in the lane's pool as there are slots, and
nothing of the run's lies among them.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum

import torch

from residency import _device
from residency._errors import RefusedError
from residency._frozen._homes import FrozenUnit, empty_storage, release, take
from residency._modes import callers_modes_off
from residency._transfer import Flight, Mover, lanes_of, seconds_between

_MOST_LOADS = 64  # of which the rate is that
_MOST_STALLS = 4096  # whose times are not read yet: a loop that never waits for its device


class Pass(IntEnum):
    """The kind of a pass, which tells the order of units."""

    TRAINING = 0
    EVALUATION = 1
    BACKWARD = 2


class UnitSlots:
    """The device's share of the units of one model.

    Args:
        units: All of them.
        device: An accelerator.
        num_slots: How many may be there at once.

    Attributes:
        room: The bytes of one slot.
        num_loads: Copies of a unit so far.
        num_late: Those of them that came when the unit was needed already.
        copied_bytes: What the copies moved.
    """

    _is_made = False  # of one that an interrupt left half made, which has nothing here

    def __init__(self, units: Sequence[FrozenUnit], device: torch.device, num_slots: int) -> None:
        self.device = device
        self.num_slots = num_slots
        self.room = max(unit.num_bytes for unit in units)
        self.num_loads = self.num_late = self.copied_bytes = 0
        self._units = list(units)
        self._here: list[FrozenUnit] = []  # the least recently used first
        self._lock = threading.RLock()  # hooks of a backward pass run on a thread of autograd's
        self._next: dict[tuple[int, int, Pass], FrozenUnit] = {}
        self._last: tuple[int, int, Pass] = (-1, -1, Pass.EVALUATION)
        self._loads: deque[tuple[Flight, int]] = deque(maxlen=_MOST_LOADS)
        self._stalls: deque[tuple[torch.Event, torch.Event]] = deque(maxlen=_MOST_STALLS)
        self._exposed_seconds = 0.0
        self._is_made = True
        # Their memory is there from here on, if it is there at all.
        blocks = [empty_storage(self.room, device) for _ in range(num_slots)]
        del blocks

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self._is_made and self._here and not is_finalizing():
            self.drop_all()

    @property
    def held_bytes(self) -> int:
        """The bytes of the slots that are taken."""
        return len(self._here) * self.room

    def bring(self, unit: FrozenUnit, kind: Pass, keep: Sequence[FrozenUnit] = ()) -> None:
        """Makes the current stream read a unit's bytes, and begins to bring the unit that follows.

        Args:
            unit: The one that is needed now.
            kind: By which pass.
            keep: Others that must stay.

        Raises:
            RefusedError: More units are in use at once than there are slots.
            torch.OutOfMemoryError: The device has no room for a slot.
        """
        with self._lock:
            self._bring(unit, [unit, *keep])
            if self._last[1] != unit.index:
                self._next[self._last] = unit
                self._last = (self._last[1], unit.index, kind)
                self._bring_ahead(unit, kind, keep)

    def bring_back(self, unit: FrozenUnit) -> None:
        """Makes the current stream read the bytes of a unit of which autograd has kept a part."""
        with self._lock:
            self._bring(unit, [unit])

    def drop_all(self) -> None:
        """Gives the device's memory back, behind all that reads it; not of a unit whose module is
        called now.
        """
        with self._lock:
            for unit in [each for each in self._here if not each.calls]:
                self._drop(unit, Mover(self.device))

    def rate(self) -> float | None:
        """Returns the bytes per second of the newest copies, None without any; blocks the host."""
        with self._lock:
            loads = list(self._loads)
        seconds = sum(flight.seconds() for flight, _ in loads)
        return sum(num_bytes for _, num_bytes in loads) / seconds if seconds else None

    def exposed_seconds(self) -> float:
        """Returns for how long computing streams have waited for copies; blocks the host."""
        with self._lock:
            while self._stalls:
                self._read_stall()
            return self._exposed_seconds

    # --------------------------------------------------------------------------------------- moves

    def _bring(self, unit: FrozenUnit, keep: Sequence[FrozenUnit]) -> None:
        mover = Mover(self.device)
        if unit.flight is not None and not unit.is_in_use and unit.is_stale:
            self._drop(unit, mover)
        if unit.flight is None:
            self.num_late += 1
            if not self._load(unit, keep, mover):
                raise RefusedError(
                    f"{unit.name} is needed while {', '.join(u.name for u in self._here)} are in "
                    f"use, and there are {self.num_slots} slots. Call stream_frozen with more "
                    "slots, or with units that are not called within one another."
                )
        else:
            self._here = [*(each for each in self._here if each is not unit), unit]
        stream = _device.current_stream(self.device)
        reader = (stream.stream_id, stream.device_index)
        if reader not in unit.readers:
            assert unit.flight is not None
            begun = mover.mark()
            mover.land(unit.flight)
            unit.readers[reader] = stream
            self._stalls.append((begun, mover.mark()))
            while self._stalls and self._stalls[0][1].query():
                self._read_stall()

    def _bring_ahead(self, unit: FrozenUnit, kind: Pass, keep: Sequence[FrozenUnit]) -> None:
        """Brings the units that came next the last time, as many as have a slot; of an order that
        is new, the neighbours.
        """
        kept = [unit, *keep]
        key = self._last
        for _ in range(self.num_slots - 1):
            following = self._next.get(key) or self._neighbour(key[1], kind)
            if following is None or following in kept:
                return
            kept.append(following)
            if following.flight is None and not self._load(following, kept, Mover(self.device)):
                return
            key = (key[1], following.index, kind)

    def _neighbour(self, index: int, kind: Pass) -> FrozenUnit | None:
        index += -1 if kind == Pass.BACKWARD else 1
        return self._units[index] if 0 <= index < len(self._units) else None

    @callers_modes_off()
    def _load(self, unit: FrozenUnit, keep: Sequence[FrozenUnit], mover: Mover) -> bool:
        """Brings a unit to a slot; returns whether one could be had."""
        others = [each for each in self._here if each is not unit]
        if len(others) >= self.num_slots:
            going = (each for each in others if each not in keep and not each.calls)
            gone = next(going, None)
            if gone is None:
                return False
            self._drop(gone, mover)
        try:
            take(unit.memory, self.room, self.device)
            unit.load(mover, timed=True)
            self._here = [*(each for each in self._here if each is not unit), unit]
        except BaseException:
            mover.settle()
            unit.flight = None
            self._here = [each for each in self._here if each is not unit]
            release(unit.memory, self.device)
            raise
        assert unit.flight is not None
        self._loads.append((unit.flight, unit.num_bytes))
        self.num_loads += 1
        self.copied_bytes += unit.num_bytes
        return True

    def _drop(self, unit: FrozenUnit, mover: Mover) -> None:
        for task in list(unit.tasks):
            unit.leave(unit.tasks, task)
        unit.point_home()
        for stream in unit.readers.values():
            # What it has queued reads the bytes, and the next copy writes others there.
            mover.follow_to_device(lanes_of(self.device).mark(stream))
        # An interrupt between two of these leaves a unit that is there, or one without a copy.
        unit.readers = {}
        unit.flight = None
        release(unit.memory, self.device)
        self._here = [each for each in self._here if each is not unit]

    def _read_stall(self) -> None:
        self._exposed_seconds += seconds_between(*self._stalls.popleft())
