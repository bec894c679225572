"""The other side of a hand-off: states its need in bytes, and uses them once they are proven."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from residency import _device
from residency._errors import HandOffError, InvalidArgumentError, ResidencyError
from residency._handoff._peer import (
    Deadline,
    Link,
    ask_for_device,
    check_path,
    check_timeout,
    return_and_stay,
)
from residency._handoff._reclaim import reclaim
from residency._units import format_bytes, parse_bytes

_log = logging.getLogger("residency")


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenOver:
    """The room on a device that another process handed over to this one.

    Attributes:
        need: The bytes that it asked for.
        free: The bytes that are free on the device now, by its own figure.
        free_before: The bytes that were free when it asked.
        capacity: All bytes of the device.
        device: The device.
        seconds: How long it waited, for the other process to come and to make the room.
    """

    need: int
    free: int
    free_before: int
    capacity: int
    device: str
    seconds: float

    def __str__(self) -> str:
        free, before = format_bytes(self.free), format_bytes(self.free_before)
        return (
            f"{free} of {format_bytes(self.capacity)} are free on {self.device}; "
            f"{format_bytes(self.need)} were asked for, when {before} were free, "
            f"{self.seconds:.2f} s ago"
        )


def take_over(
    need: int | str,
    *,
    peer: str | os.PathLike[str],
    device: torch.device | int | str | None = None,
    timeout: float = 60.0,
) -> AbstractContextManager[TakenOver]:
    """Asks a process that calls `residency.hand_off` for bytes, and has them while the body runs.

    The body must free everything that it allocates. On exit the allocator's cache goes back to the
    device, and the other process learns that it may take the device back. If one process is killed
    or ends with an error before the next hand-off, the other one learns it at once.

    Args:
        need: Bytes, or a size such as ``"20GiB"``, that the body will take.
        peer: The path at which the other process hands the device over.
        device: The accelerator, by default the current one.
        timeout: Seconds to wait for the other process, which may not be ready yet.

    Returns:
        A context manager. It yields the bytes that are free on the device, by its own count, and
        the time that it waited for them.

    Raises:
        HandOffError: No process hands the device over in time, the other process ended or could not
            make the room, or a third process took it meanwhile. Or the process that handed the
            device over at this path before is dead, and no other does so now.
        InvalidArgumentError: The size or the path is invalid, or there is no such accelerator.
    """
    num_bytes = parse_bytes(need, name="need")
    return _taken_over(num_bytes, check_path(peer), device, check_timeout(timeout))


@contextmanager
def _taken_over(
    num_bytes: int, path: Path, device: torch.device | int | str | None, timeout: float
) -> Iterator[TakenOver]:
    target = _device.resolve(device)
    if target is None:
        raise InvalidArgumentError(
            "There is no accelerator on this machine to take over; leave the call out here."
        )
    deadline, started = Deadline(timeout), time.monotonic()
    # Has this process's context made before the other side measures.
    free_before, capacity = _device.device_room(target) or (0, 0)
    link: Link | None = None
    is_taken = False
    try:
        link = ask_for_device(path, num_bytes, deadline)
        answer = link.receive(deadline, expected="ready")
        pid = answer.get("pid")
        link.pid = pid if isinstance(pid, int) else None
        if "refused" in answer:
            raise HandOffError(f"The other process refused: {answer['refused']}")
        free = _require_free(target, num_bytes)
        is_taken = True
        yield TakenOver(
            need=num_bytes,
            free=free,
            free_before=free_before,
            capacity=capacity,
            device=str(target),
            seconds=time.monotonic() - started,
        )
    finally:
        if is_taken and link is not None:
            _return(link, path, target)
        elif link is not None:
            link.close()


def _require_free(device: torch.device, need: int) -> int:
    room = _device.device_room(device)
    if room is None:
        raise HandOffError(
            f"{device} does not report its free bytes, so that nothing can be proven. Use a device "
            "whose driver reports free memory."
        )
    if room[0] < need:
        raise HandOffError(
            f"The other process freed {format_bytes(need)} on {device}, and "
            f"{format_bytes(room[0])} are free: a third process takes them, or the other one means "
            "another device. End the third process, or give both sides the same device."
        )
    return room[0]


def _return(link: Link, path: Path, device: torch.device) -> None:
    stays_open = False
    try:
        try:
            reclaim(device=device, collect=False)
        except (RuntimeError, ResidencyError):  # the body's own error is what the caller has to see
            _log.exception("residency: the cache of %s was not given back", device)
        return_and_stay(path, link)
        stays_open = True
    except HandOffError:
        stays_open = link.is_cut
        _log.warning("residency: the process that handed %s over has ended", device)
    finally:
        if not stays_open:
            link.close()
