"""One hand-off from its beginning to its end.

[Note: the order of a hand-off] Ranks of a group meet first, so that what their collectives take is
taken before anything is measured. What the other side needs is heard next. Then the means of
`reclaim` are tried, the cheapest first, then the listed owners are parked, in their order, each
only as far as bytes are missing. The device's own figure proves the result; ranks of a group hear
of each other; only then does the body run. On the way out the bytes of what was parked are waited
for, and exactly that comes back. Whatever fails on the way in, all of it comes back first.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from residency._errors import HandOffError, RefusedError
from residency._handoff._agreement import FAILED, agree
from residency._handoff._peer import Deadline, Link, await_taker, remember_taker
from residency._handoff._reclaim import Effort, Reclaimed
from residency._handoff._residue import residue_lines
from residency._memory import describe_device, measure
from residency._park import DoesNotFitError, Parking, fsdp_groups, remember
from residency._registries import Turns
from residency._units import format_bytes

_POLL_SECONDS = 0.005  # a look at the driver's figure takes microseconds
_GRACE_SECONDS = 5.0  # for what a rank does besides waiting; any few seconds work
_LONG_POLL_SECONDS = 0.1  # where a try costs something
_log = logging.getLogger("residency")
_active = Turns()  # devices that are handed over now


@contextmanager
def sole_hand_off(device: torch.device) -> Iterator[None]:
    """Makes this the one hand-off of a device in the process.

    Raises:
        RefusedError: One is under way.
    """
    turn = _active.take(device)
    if turn is None:
        raise RefusedError(
            f"A hand-off of {device} is under way in this process, and they do not nest. "
            "Nothing was moved; end that one first, or ask it for the larger size."
        )
    try:
        yield
    finally:
        turn.is_over = True


class HandOff:
    """One hand-off, from its beginning to its end."""

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
        # Another rank may have waited so long for its own bytes, and all of them rather late.
        self._patience = 2 * timeout + _GRACE_SECONDS
        self._timeout = timeout
        self._collect = collect
        self._group = group
        self._path = path
        self._link: Link | None = None
        self._missing = 0
        self._is_entered = False

    def enter(self) -> Reclaimed:
        """Makes the room and proves it; whatever comes of it, `leave` is to be called.

        Raises:
            HandOffError: It cannot be made here or on another rank, or the other side failed.
        """
        effort = self._make_room_together()
        if effort.missing:
            raise HandOffError(self._explain(effort))
        if self._link is not None:
            self._link.send(ready=effort.state.free, pid=os.getpid())
        self._is_entered = True
        return effort.result()

    def leave(self, error: BaseException | None) -> None:
        """Waits for the bytes and brings back what was parked, or undoes a failed entry.

        Args:
            error: The one with which the body, or the entry, ended.

        Raises:
            HandOffError: They are not free in time, here or on another rank.
        """
        if not self._is_entered:
            assert error is not None
            self._withdraw(error)
            return
        self._await_return()
        try:
            self._bring_back()
        except HandOffError as problem:
            if error is not None and not isinstance(error, Exception):
                error.add_note(str(problem))  # an interrupt means the end: `unpark` goes on if not
                return
            raise problem from error

    def _await_return(self) -> None:
        """Waits until the other process says that it is done, or has ended."""
        if self._link is None:
            return
        assert self._path is not None
        stays_open = False
        try:
            answer = self._link.receive(Deadline(self._timeout), expected="returned")
            stays_open = answer.get("stays") is True
        except HandOffError as problem:  # what a process had that has ended comes back by itself
            _log.warning("residency: %s The device is taken back.", str(problem))
            stays_open = self._link.is_cut  # the next hand-off has to know
        finally:
            if stays_open:
                remember_taker(self._path, self._link)
            else:
                self._link.leave()  # this process lives: the other one may ask again

    def _make_room_together(self) -> Effort:
        """Makes room, on all ranks of a group or on none."""
        if self._group is None:
            return self._make_room()
        # A group's first collective may make its communicator, in hundreds of MiB of the device.
        agree(self._group, self._device, 0, seconds=self._patience)
        try:
            effort = self._make_room()
            if self._link is not None:
                self._link.check()  # before a rank counts on it
        except Exception:
            agree(self._group, self._device, FAILED, seconds=self._patience)
            raise
        agree(self._group, self._device, effort.missing, seconds=self._patience)
        return effort

    def _make_room(self) -> Effort:
        """Frees what is needed, as far as that is possible."""
        if self._path is not None:
            self._link, stated = await_taker(self._path, Deadline(self._timeout))
            self._need = max(self._need, stated)
        effort = Effort(self._device, self._need, collect=self._collect)
        effort.run()
        for parking in self._parkings if self._can_suffice(effort) else ():
            left = parking.num_bytes_on_device
            while not effort.is_enough and left:
                remember(parking)  # whatever comes, `unpark` knows of it
                parking.park(effort.missing)
                effort.give_back("parked")  # what shares a segment with others gives nothing back
                before, left = left, parking.num_bytes_on_device
                if left >= before:
                    break
        effort.state = measure(self._device)  # the proof: the device's own figure, last of all
        return effort

    def _can_suffice(self, effort: Effort) -> bool:
        """Returns whether parking everything could make the room, before anything is moved."""
        modules = [p.owner for p in self._parkings if isinstance(p.owner, nn.Module)]
        if any(any(fsdp_groups(module)) for module in modules):
            return True  # what they have gathered goes, too
        state = effort.state
        parkable = sum(parking.num_bytes_on_device for parking in self._parkings)
        held_by_them = min(state.held, 2 * parkable)  # the most that the allocator rounds up to
        return state.free + (state.reserved - state.held) + held_by_them >= self._need

    def _explain(self, effort: Effort) -> str:
        device, freed = self._device, effort.result()
        sources = ", ".join(f"{name} {format_bytes(n)}" for name, n in freed.by_means().items())
        lines = [
            f"{format_bytes(self._need)} were to be free on {device}, and "
            f"{format_bytes(freed.free)} are, {format_bytes(effort.missing)} too few. Given back: "
            f"{sources}. Everything that was parked is back; "
            "list more owners in `park`, or let go of the holders that are named here.",
            describe_device(device),
            *residue_lines(device, effort.state),
            *(f"note: {note}" for note in freed.notes),
        ]
        return "\n".join(lines)

    def _withdraw(self, error: BaseException) -> None:
        """Undoes what was done so far; the other side hears why."""
        if self._link is not None:
            try:
                with suppress(HandOffError):
                    self._link.send(refused=str(error).partition("\n")[0])
            finally:
                self._link.close()
        try:
            self._bring_back_alone()  # the other ranks may be elsewhere by now
        except HandOffError as problem:  # another process took, meanwhile, what was freed
            if not isinstance(error, Exception):
                error.add_note(str(problem))
                return
            raise problem from error

    def _bring_back(self) -> None:
        """Brings back what is parked, and hears whether the other ranks did.

        Raises:
            HandOffError: It is not free in time, here or on another rank.
        """
        problem = self._unpark_in_time()
        if self._group is not None:
            try:
                agree(self._group, self._device, self._missing, seconds=self._patience)
            except HandOffError as other:
                problem = problem or other
        self._raise_with_retry(problem, self._bring_back)

    def _bring_back_alone(self) -> None:
        self._raise_with_retry(self._unpark_in_time(), self._bring_back_alone)

    def _raise_with_retry(self, problem: Exception | None, bring_back: Callable[[], None]) -> None:
        if problem is None:
            return

        def retry() -> None:
            with sole_hand_off(self._device):
                bring_back()

        is_parked = any(parking.is_parked for parking in self._parkings)
        raise HandOffError(str(problem), bring_back=retry, is_parked=is_parked) from problem

    def _unpark_in_time(self) -> Exception | None:
        """Returns what stood against it when the time was over; None where all is back."""
        self._missing = 0
        if not any(parking.is_parked for parking in self._parkings):
            return None
        deadline, pause = Deadline(self._timeout), _POLL_SECONDS
        while True:
            parked = sum(parking.num_bytes_parked for parking in self._parkings)
            try:
                state = measure(self._device)
                # What is stuck may be the very holes that the parked tensors left.
                own = state.returnable + state.draining + (state.stuck or 0)
                missing = max(0, parked - state.free - own)
                for parking in self._parkings if not missing else ():
                    parking.unpark()
            except DoesNotFitError as error:  # in pieces; everything is whole still
                missing, pause = error.num_bytes, _LONG_POLL_SECONDS
            except Exception as error:
                error.add_note("The parked owners are whole on the host: residency.unpark.")
                self._missing = FAILED
                return error
            self._missing = missing
            if not missing:
                return None
            if not deadline.pause(pause):
                return HandOffError(self._explain_absence(missing, parked))

    def _explain_absence(self, missing: int, parked: int) -> str:
        state = measure(self._device)
        free = state.free + state.returnable + state.draining + (state.stuck or 0)
        if free < parked:
            what = (
                f"{format_bytes(missing)} that were handed over on {self._device} are not free "
                f"again after {self._timeout:g} s. The parked owners are whole on the host; free "
                "the bytes, and call this error's retry()."
            )
        else:
            what = (
                f"{format_bytes(missing)} of {format_bytes(parked)} that were parked do not fit "
                f"back on {self._device} after {self._timeout:g} s, though {format_bytes(free)} "
                "are free: they are in pieces, between tensors that stayed or are new. The parked "
                "owners are whole on the host; free some tensors that are named here, and call "
                "this error's retry()."
            )
        return "\n".join([what, str(state), *residue_lines(self._device, state)])
