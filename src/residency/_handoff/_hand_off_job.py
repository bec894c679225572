"""One hand-off from its beginning to its end.

[Note: the order of a hand-off] What the other side needs is heard first. Then the means of
`reclaim` are tried, the cheapest first, then the listed owners are parked, in their order, each
only as far as bytes are missing. The device's own figure proves the result; ranks of a group hear
of each other; only then does the body run. On the way out the bytes of what was parked are waited
for, and exactly that comes back. Whatever fails on the way in, all of it comes back first.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from residency._errors import HandOffError
from residency._handoff._agreement import FAILED, agree
from residency._handoff._parking import Parking
from residency._handoff._peer import Deadline, Link, await_taker
from residency._handoff._reclaim import Effort, Reclaimed
from residency._handoff._residue import residue_lines
from residency._memory._post_mortem import describe_device
from residency._memory._state import measure
from residency._units import format_bytes

_POLL_SECONDS = 0.005
_GRACE_SECONDS = 5.0


class HandOff:
    """Is one hand-off, from its beginning to its end."""

    def __init__(
        self,
        device: torch.device,
        need: int,
        parkings: list[Parking],
        *,
        timeout: float,
        collect: bool,
        group: Any,
        path: Path | None,
    ) -> None:
        """Describes a hand-off that has not begun."""
        self._device = device
        self._need = need
        self._parkings = parkings
        self._parked_bytes = 0
        # Another rank may have waited so long for its own bytes, and all of them rather late.
        self._patience = 2 * timeout + _GRACE_SECONDS
        self._timeout = timeout
        self._collect = collect
        self._group = group
        self._path = path
        self._link: Link | None = None

    def enter(self) -> Reclaimed:
        """Makes the room and proves it.

        Raises:
            HandOffError: It cannot be made here or on another rank, or the other side failed.
                Everything is back.
        """
        effort: Effort | None = None
        try:
            try:
                effort = self._make_room()
            finally:
                if self._group is not None:
                    failed = FAILED if effort is None else effort.missing
                    agree(self._group, failed, seconds=self._patience)
            if effort.missing:
                raise HandOffError(self._explain(effort))
            if self._link is not None:
                self._link.send(ready=effort.state.free)
        except BaseException as error:
            self._withdraw(error)
            raise
        return effort.result()

    def leave(self, error: BaseException | None) -> None:
        """Waits for the bytes and brings back what was parked.

        Args:
            error: The one with which the body ended.

        Raises:
            HandOffError: They are not free in time, here or on another rank.
        """
        deadline = Deadline(self._timeout)
        if self._link is not None:
            try:  # a process that has ended has given everything back
                with suppress(HandOffError):
                    self._link.receive(deadline, expected="returned")
            finally:
                self._link.close()
        try:
            self._bring_back(deadline)
        except HandOffError as problem:
            raise problem from error

    def _make_room(self) -> Effort:
        """Frees what is needed, as far as that is possible."""
        if self._path is not None:
            self._link, stated = await_taker(self._path, Deadline(self._timeout))
            self._need = max(self._need, stated)
        effort = Effort(self._device, self._need, collect=self._collect)
        effort.run()
        for parking in self._parkings if self._can_suffice(effort) else ():
            while not effort.is_enough and (parked := parking.park(effort.missing)):
                self._parked_bytes += parked
                effort.give_back("parked")  # what shares a segment with others gives nothing back
        effort.state = measure(self._device)  # the proof: the device's own figure, last of all
        return effort

    def _can_suffice(self, effort: Effort) -> bool:
        """Says whether parking everything could make the room, before anything is moved."""
        state = effort.state
        parkable = sum(parking.num_bytes_on_device for parking in self._parkings)
        held_by_them = min(state.held, 2 * parkable)  # the most that the allocator rounds up to
        return state.free + (state.reserved - state.held) + held_by_them >= self._need

    def _explain(self, effort: Effort) -> str:
        device, freed = self._device, effort.result()
        means = ", ".join(f"{name} {format_bytes(n)}" for name, n in freed.by_means().items())
        lines = [
            f"{format_bytes(self._need)} were to be free on {device}, and "
            f"{format_bytes(freed.free)} are, {format_bytes(effort.missing)} too few. Given back: "
            f"{means}. Everything that was parked is back; "
            "list more owners in `park`, or let go of what is named here.",
            describe_device(device),
            *residue_lines(device, effort.state),
            *(f"note: {note}" for note in freed.notes),
        ]
        return "\n".join(lines)

    def _withdraw(self, error: BaseException) -> None:
        """Undoes what was done so far; the other side hears why."""
        if self._link is not None:
            with suppress(HandOffError):
                self._link.send(refused=str(error).partition("\n")[0])
            self._link.close()
        try:
            self._bring_back_alone()  # the other ranks may be elsewhere by now
        except HandOffError as problem:  # somebody took, meanwhile, what was freed
            raise problem from error

    def _bring_back(self, deadline: Deadline) -> None:
        missing = self._unpark_in_time(deadline)
        problem: HandOffError | None = None
        if self._group is not None:
            try:
                agree(self._group, missing, seconds=self._patience)
            except HandOffError as error:
                problem = error
        if missing or problem is not None:
            text = str(problem) if problem is not None else self._explain_absence(missing)
            raise HandOffError(
                text, bring_back=lambda: self._bring_back(Deadline(self._timeout))
            ) from problem

    def _bring_back_alone(self) -> None:
        missing = self._unpark_in_time(Deadline(self._timeout))
        if missing:
            raise HandOffError(self._explain_absence(missing), bring_back=self._bring_back_alone)

    def _unpark_in_time(self, deadline: Deadline) -> int:
        """Returns the bytes that are missing when the time is over; 0 where all is back."""
        while True:
            state = measure(self._device)
            missing = max(0, self._parked_bytes - state.free - state.returnable)
            if not missing:
                try:
                    self._unpark()
                except torch.OutOfMemoryError:  # segments round up; everything is whole still
                    missing = self._parked_bytes
                else:
                    return 0
            if not deadline.pause(_POLL_SECONDS):
                return missing

    def _unpark(self) -> None:
        for parking in self._parkings:
            self._parked_bytes -= parking.unpark()
        self._parked_bytes = 0  # what was let go of meanwhile does not come back

    def _explain_absence(self, missing: int) -> str:
        state = measure(self._device)
        return "\n".join(
            [
                f"{format_bytes(missing)} that were handed over on {self._device} are not free "
                f"again after {self._timeout:g} s. What was parked is whole on the host; free "
                "them, and call this error's retry().",
                str(state),
                *residue_lines(self._device, state),
            ]
        )
