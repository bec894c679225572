"""The figures of one offloaded optimizer, and the clock readings that some of them come from."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from residency._transfer import Flight, seconds_between
from residency._units import format_figures

_MEANINGS = {
    "home_bytes": "of state that lives on the host",
    "pinned_bytes": "of page-locked host memory for it, present and to come",
    "resident_bytes": "of state that stays on the device",
    "slot_bytes": "on the device for each slot of the newest step",
    "num_slots": "slots at most at once",
    "num_buckets": "buckets in the newest step, each in a slot for a while",
    "num_steps": "steps since the offload",
    "copied_to_device_bytes": "copied to the device by all steps",
    "copied_to_host_bytes": "copied to the host by all steps",
    "step_to_device_bytes": "copied to the device by the newest step",
    "step_to_host_bytes": "copied to the host by the newest step",
    "to_device_bytes_per_second": "while it copied to the device",
    "to_host_bytes_per_second": "while it copied to the host",
    "exposed_seconds": "for which its computation waited for copies",
    "ahead_bytes": "of state that was on the device when the newest step began",
    "room_bytes": "of room that the run's own peak left for it then",
    "hidden_bytes": "copied under the passes before the newest step, both ways",
    "exposed_bytes": "copied in the newest step, both ways",
    "dropped_bytes": "copied to the device under those passes and given up before the step",
}
_TIMED = ("to_device_bytes_per_second", "to_host_bytes_per_second", "exposed_seconds")
_SIMULATED = ", on the simulated accelerator"


@dataclass(slots=True)
class Timeline:
    """The events of one step, which are read only when the figures are asked for.

    Attributes:
        loads: Each unit's copies to the device, with their bytes.
        stores: Each unit's copies to the host, with their bytes.
        stalls: Around each wait of the computing stream for copies.
    """

    loads: list[tuple[Flight, int]] = field(default_factory=list)
    stores: list[tuple[Flight, int]] = field(default_factory=list)
    stalls: list[tuple[torch.Event, torch.Event]] = field(default_factory=list)

    def exposed_seconds(self) -> float:
        """Returns the time for which the computing stream waited for copies; blocks the host."""
        return sum(seconds_between(start, end) for start, end in self.stalls)


def bytes_per_second(copies: list[tuple[Flight, int]]) -> float | None:
    """Returns the rate of copies while they ran, or None without any; blocks the host."""
    seconds = sum(flight.seconds() for flight, _ in copies)
    return sum(num_bytes for _, num_bytes in copies) / seconds if seconds else None


@dataclass(frozen=True, slots=True)
class OffloadStatistics:
    """The figures of one offloaded optimizer at one moment.

    Attributes:
        home_bytes: Bytes of the state that lives on the host, ``numel * itemsize``.
        pinned_bytes: Bytes of page-locked host memory for it, present and to come.
        resident_bytes: Bytes of the state that stays on the device.
        slot_bytes: Bytes of one device buffer in the newest step.
        num_slots: Device buffers at most in use at once.
        num_buckets: Units that the newest step moved.
        num_steps: Steps taken since the offload.
        copied_to_device_bytes: Bytes copied to the device by steps so far.
        copied_to_host_bytes: Bytes copied to the host by steps so far.
        step_to_device_bytes: Bytes that the newest step copied to the device.
        step_to_host_bytes: Bytes that the newest step copied to the host.
        to_device_bytes_per_second: Rate of those copies while they ran, None without any.
        to_host_bytes_per_second: Rate of those copies while they ran, None without any.
        exposed_seconds: Time for which the newest step's computation waited for copies, None
            before the first step.
        ahead_bytes: Bytes of state that were on the device when the newest step began, with
            ``overlap``: it moved them outside of the step.
        room_bytes: Bytes that the run's own peak left for such state then.
        hidden_bytes: Bytes copied under the passes before the newest step, in both directions.
        exposed_bytes: Bytes copied in the newest step, in both directions.
        dropped_bytes: Bytes copied to the device under those passes, and given up before the step
            because the run needed the room.
        is_simulated: Whether rates and time are the simulated accelerator's, and so not measured.
    """

    home_bytes: int
    pinned_bytes: int
    resident_bytes: int
    slot_bytes: int
    num_slots: int
    num_buckets: int
    num_steps: int
    copied_to_device_bytes: int
    copied_to_host_bytes: int
    step_to_device_bytes: int
    step_to_host_bytes: int
    to_device_bytes_per_second: float | None
    to_host_bytes_per_second: float | None
    exposed_seconds: float | None
    ahead_bytes: int = 0
    room_bytes: int = 0
    hidden_bytes: int = 0
    exposed_bytes: int = 0
    dropped_bytes: int = 0
    is_simulated: bool = False

    def __str__(self) -> str:
        meanings = dict(_MEANINGS)
        if self.is_simulated:
            meanings |= {name: meanings[name] + _SIMULATED for name in _TIMED}
        return format_figures("an offloaded optimizer", self, meanings)
