"""Makes room on a device for somebody else, proves it, and takes the device back.

[Note: the order of a hand-off] What the other side needs is heard first. Then the means of
`reclaim` are tried, the cheapest first, then the listed owners are parked, in their order, each
only as far as bytes are missing. The device's own figure proves the result; ranks of a group hear
of each other; only then does the body run. On the way out the bytes of what was parked are waited
for, and exactly that comes back. Whatever fails on the way in, all of it comes back first.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from residency import _device
from residency._errors import HandOffError, InvalidArgumentError, RefusedError
from residency._handoff._agreement import FAILED, agree
from residency._handoff._park import is_parked
from residency._handoff._park_tensors import tensors_of
from residency._handoff._parking import Parking
from residency._handoff._peer import Deadline, Link, await_taker, check_path
from residency._handoff._reclaim import Effort, Reclaimed
from residency._handoff._residue import residue_lines
from residency._handoff._segments import expandable_segments as segments
from residency._handoff._segments import require_settable
from residency._memory._post_mortem import describe_device
from residency._memory._state import measure
from residency._units import format_bytes, parse_bytes

_POLL_SECONDS = 0.005
_active: set[torch.device] = set()  # devices that are handed over now
_active_lock = threading.Lock()


@contextmanager
def hand_off(
    need: int | str,
    *,
    park: Sequence[Any] = (),
    device: torch.device | int | str | None = None,
    timeout: float = 60.0,
    collect: bool = True,
    group: Any = None,
    peer: str | os.PathLike[str] | None = None,
    expandable_segments: bool | None = None,
) -> Iterator[Reclaimed]:
    """Has a number of bytes free on the device while the body runs, and proves it.

    Tries the means of `residency.reclaim` first and stops with the cheapest that suffice; then
    parks the listed owners, in their order, as far as bytes are missing. On exit, also after an
    exception, exactly what was parked comes back.

    Args:
        need: Bytes, or a size such as ``"20GiB"``, that are to be free by the device's own figure.
        park: Modules and optimizers whose bytes may be moved to the host, the first ones first. An
            offloaded optimizer costs nothing.
        device: The accelerator, by default the current one.
        timeout: Seconds for each wait: for the other side, for ranks, and on exit for the bytes.
        collect: Whether garbage may be collected, where a search found that it pays.
        group: A process group of ranks that hand over together: none enters the body before all
            have their bytes, and all raise if one has not. One with a host backend is best.
        peer: A path, for a process on this machine that calls `residency.take_over` with it: that
            process states its bytes, gets them proven, and says when they are free again. The
            larger of its need and `need` counts.
        expandable_segments: Whether the allocator's segments may grow inside the body; None leaves
            the setting alone.

    Yields:
        The bytes that went back to the device, by means.

    Raises:
        HandOffError: The bytes cannot be reached: everything parked is back, and the message has
            the memory's table and who holds how much. Or, on exit, they did not come back in
            time: everything is whole on the host, and the error's ``retry()`` tries again.
        InvalidArgumentError: The size does not parse, there is no such accelerator, an owner has
            nothing on it, or an optimizer is not one of the listed modules'.
        RefusedError: A hand-off of the device is under way, a graph is being captured, or the
            device does not tell its free bytes. Nothing was moved.

    Memory:
        No device memory. Pinned host memory for what is parked, kept for the next time.
    """
    target = _device.resolve(device)
    if target is None:
        raise InvalidArgumentError("There is no accelerator on this machine to hand over.")
    if _device.is_capturing(target):
        raise RefusedError(
            "The current stream is being captured into a graph. Nothing was done; hand the device "
            "over before or after the capture."
        )
    job = HandOff(
        target,
        parse_bytes(need, name="need"),
        _parkings_of(park, target),
        timeout=_checked_timeout(timeout),
        collect=collect,
        group=group,
        path=None if peer is None else check_path(peer),
    )
    require_settable(target, expandable_segments)
    with _sole_hand_off(target):
        freed = job.enter()
        try:
            # Not around what follows: what comes back is to be born as it was before.
            with segments(target, expandable_segments):
                yield freed
        except BaseException as error:
            job.leave(error)
            raise
        job.leave(None)


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
                    agree(self._group, failed, seconds=self._timeout)
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
                agree(self._group, missing, seconds=self._timeout)
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


def _parkings_of(owners: Sequence[Any], device: torch.device) -> list[Parking]:
    """Returns a parking for each listed owner, none of which has moved anything.

    Raises:
        InvalidArgumentError: An owner is listed twice, has nothing on the device, or is the
            optimizer of a module that is not listed while others are.
    """
    if isinstance(owners, nn.Module | Optimizer):
        owners = [owners]
    modules = [owner for owner in owners if isinstance(owner, nn.Module)]
    known = {id(parameter) for module in modules for parameter in module.parameters()}
    for number, owner in enumerate(owners):
        name = f"park[{number}] ({type(owner).__name__})"
        if any(owner is other for other in owners[:number]):
            raise InvalidArgumentError(f"{name} is listed before. Nothing was moved.")
        if isinstance(owner, Optimizer):
            own = [id(p) for group in owner.param_groups for p in group["params"]]
            if modules and known.isdisjoint(own):
                raise InvalidArgumentError(
                    f"{name} optimizes no parameter of the listed modules. Nothing was moved; "
                    "list its own model, or no module."
                )
        _require_on(owner, device, name=name)
    return [Parking(owner) for owner in owners]


def _require_on(owner: Any, device: torch.device, *, name: str) -> None:
    if not isinstance(owner, nn.Module | Optimizer):
        raise InvalidArgumentError(
            f"{name} cannot be parked; expected a module or an optimizer. Nothing was moved."
        )
    found = {tensor.device for _, tensor in tensors_of(owner)}
    elsewhere = {place for place in found if place.type != "cpu" and place != device}
    is_host_module = isinstance(owner, nn.Module) and found and not is_parked(owner)
    if elsewhere or (is_host_module and device not in found):
        places = ", ".join(sorted(map(str, found)))
        raise InvalidArgumentError(
            f"{name} is on {places}, and {device} is to be handed over. Nothing was moved; list "
            "what is on that device."
        )


@contextmanager
def _sole_hand_off(device: torch.device) -> Iterator[None]:
    """Makes this the one hand-off of a device in the process.

    Raises:
        RefusedError: One is under way.
    """
    with _active_lock:
        if device in _active:
            raise RefusedError(
                f"A hand-off of {device} is under way in this process, and they do not nest. "
                "Nothing was moved; end that one first, or ask it for the larger size."
            )
        _active.add(device)
    try:
        yield
    finally:
        _active.discard(device)


def _checked_timeout(timeout: float) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:
        raise InvalidArgumentError(f"timeout is {timeout!r}; expected seconds, 0 or more.")
    return float(timeout)
