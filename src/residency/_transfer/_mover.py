"""Moves bytes between the memories of host and device: the order of a copy, stated once.

A move is a pair of tensors of one size, target and source; a mover queues a list of moves on the
lane of their direction and returns their flight. Invariant, which
``tests/transfer/test_mover.py`` tries to break: the four sentences of its promise.

1. *Final*: a move reads its source as it was when the producer's stream came to the call.
2. *Unread*: a move writes memory after its last reader.
3. *Kept*: code that writes or frees memory comes after the moves that read it.
4. *Nothing left behind*: after ``settle`` no move is under way, whatever came in between.

[Note: who follows] On the device, ``follow_to_host`` makes a move read what the caller's stream has
written (1), and ``follow_to_device`` makes it write behind the earlier readers of memory that was
allocated on that stream (2). Reads by other moves are known to the gate (2, 3). On the host, the
caller names memory that is free, or not lent: lending answers before there is a move.

[Note: interrupts of a move] An interrupt may come between a copy and the event after it, or before
the caller has the flight, which then cannot be waited for. ``settle`` asks the lanes instead, so it
precedes the return of any memory after an error: ``except BaseException: mover.settle(); raise``. A
``with`` would not do, whose exit is Python, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from residency import _device
from residency._transfer._events import seconds_between, wait_asleep
from residency._transfer._gate import Read, gate_of
from residency._transfer._lanes import copy_on, copy_out, lanes_of, on_lane

Move = tuple[Tensor, Tensor]


class Flight:
    """A list of moves that one event covers.

    Attributes:
        event: Recorded on the lane after them.
        begun: Recorded on the lane before them, of timed ones.
    """

    __slots__ = ("_read", "begun", "event")

    def __init__(
        self, event: torch.Event, begun: torch.Event | None = None, read: Read | None = None
    ) -> None:
        self.event = event
        self.begun = begun
        self._read = read

    def is_over(self) -> bool:
        """Returns whether the moves are done, without a wait."""
        if is_done := self.event.query():
            self._end()
        return is_done

    def wait(self, *, asleep: bool = False) -> None:
        """Blocks the host until the moves are done; from any thread, and again.

        Args:
            asleep: Whether the thread leaves its core to others meanwhile, see ``wait_asleep``.
        """
        if asleep:
            wait_asleep(self.event)
        else:
            self.event.synchronize()  # the caller reads or frees what was moved
        self._end()

    def seconds(self) -> float:
        """Returns the lane's time from the first to the last of timed moves; blocks the host."""
        assert self.begun is not None
        return seconds_between(self.begun, self.event)

    def _end(self) -> None:
        if self._read is not None:
            self._read.end()  # no writer waits for the moves from here on


class Mover:
    """The way between the host and one device; all movers of a device share its lanes and its gate.

    Args:
        device: An accelerator. Its current stream is the caller's stream from here on, behind which
            moves come and which comes behind them.
    """

    __slots__ = ("_gate", "_lanes", "_stream")

    def __init__(self, device: torch.device) -> None:
        self._lanes = lanes_of(device)
        self._gate = gate_of(device)
        self._stream = _device.current_stream(device)

    def follow_to_host(self, event: torch.Event | None = None) -> None:
        """Makes moves to the host read what the caller's stream writes up to here, or to an event
        on whatever stream.
        """
        # Else they would read what the producer has not written yet.
        _device.wait_event(self._lanes.d2h, event or self._lanes.mark(self._stream))

    def follow_to_device(self, event: torch.Event | None = None) -> None:
        """Makes moves to the device come behind all that the caller's stream does up to here, or
        behind an event on whatever stream.
        """
        # The memory was another's, whose work may still read it.
        _device.wait_event(self._lanes.h2d, event or self._lanes.mark(self._stream))

    def to_host(
        self,
        moves: Iterable[Move],
        sources: Sequence[Tensor],
        *,
        then: Callable[[], Move] | None = None,
        timed: bool = False,
    ) -> Flight:
        """Queues moves from the device, which ``follow_to_host`` precedes.

        Args:
            moves: To host memory that nothing else reads or writes.
            sources: All that they read. The caller keeps it until the flight is over or passes it
                to ``let_go``.
            then: Called on the lane behind the moves; computes a last one.
            timed: Whether the flight's events are.
        """
        lane = self._lanes.d2h
        begun = self._lanes.mark(lane, timed=True) if timed else None
        copy_out(self._lanes, moves)
        if then is not None:
            with on_lane(lane):
                last = then()
            copy_on(lane, [last])
            sources = [*sources, last[1]]
        event = self._lanes.mark(lane, timed=timed)
        return Flight(event, begun, self._gate.reading(sources, event, lane))

    def to_device(
        self, moves: Iterable[Move], *, over: Sequence[Tensor] = (), timed: bool = False
    ) -> Flight:
        """Queues moves to the device, to memory that ``follow_to_device`` precedes.

        Args:
            moves: The caller keeps the sources as they are until the flight is over.
            over: Of the targets, those that earlier moves may still read.
            timed: Whether the flight's events are.
        """
        lane = self._lanes.h2d
        if over:
            self._gate.before_write(over, stream=lane)
        begun = self._lanes.mark(lane, timed=True) if timed else None
        copy_on(lane, moves)
        return Flight(self._lanes.mark(lane, timed=timed), begun)

    def land(self, flight: Flight | None = None) -> None:
        """Makes the caller's stream read what a flight brings, or all flights to the device."""
        event = self._lanes.mark(self._lanes.h2d) if flight is None else flight.event
        _device.wait_event(self._stream, event)  # it reads the targets

    def mark(self) -> torch.Event:
        """Returns a timed event behind what the caller's stream does up to here."""
        return self._lanes.mark(self._stream, timed=True)

    def before_write(self, tensors: Iterable[Tensor]) -> None:
        """Orders what the caller's stream writes next behind the moves that read it."""
        self._gate.before_write(tensors)

    def let_go(self, sources: Sequence[Tensor]) -> None:
        """Orders what the caller's stream does next behind the moves that read ``sources``, which
        the caller frees.
        """
        self._gate.before_free(sources)

    def settle(self) -> None:
        """Blocks the host until no move is under way in either direction."""
        for lane in (self._lanes.h2d, self._lanes.turn, self._lanes.d2h):
            idle = self._lanes.mark(lane)
            # What they read or write goes back to the allocator of the caller's stream.
            _device.wait_event(self._stream, idle)
            idle.synchronize()
