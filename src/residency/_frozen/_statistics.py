"""The figures of one model whose frozen parameters stream."""

from __future__ import annotations

from dataclasses import dataclass

from residency._units import format_figures

_MEANINGS = {
    "num_units": "units, which come and go one at a time",
    "home_bytes": "of frozen parameters that live on the host",
    "pinned_bytes": "of page-locked host memory for them",
    "slot_bytes": "on the device for each slot: the largest unit",
    "num_slots": "slots at most at once",
    "here_bytes": "on the device now",
    "saved_bytes": "fewer on the device than with all of them there",
    "num_loads": "copies of a unit so far",
    "num_late": "of them began when the unit was needed already",
    "copied_bytes": "copied to the device by them",
    "to_device_bytes_per_second": "while the newest of them ran",
    "exposed_seconds": "for which the computation waited for copies",
}
_TIMED = ("to_device_bytes_per_second", "exposed_seconds")
_SIMULATED = ", on the simulated accelerator"


@dataclass(frozen=True, slots=True)
class FrozenStatistics:
    """The figures of one model whose frozen parameters stream, at one moment.

    Attributes:
        num_units: Units, which come and go one at a time.
        home_bytes: Bytes of the frozen parameters that live on the host, each rounded up to 512.
        pinned_bytes: Bytes of page-locked host memory for them.
        slot_bytes: Bytes of one slot: the largest unit.
        num_slots: Slots at most in use at once.
        here_bytes: Bytes of the slots that are in use now.
        saved_bytes: ``home_bytes - num_slots * slot_bytes``.
        num_loads: Copies of a unit so far.
        num_late: Those of them that began when the unit was needed already.
        copied_bytes: Bytes that they copied to the device.
        to_device_bytes_per_second: Rate of the newest copies while they ran, None without any.
        exposed_seconds: Time for which the computation waited for copies so far.
        is_simulated: Whether rate and time are the simulated accelerator's, and so not measured.
    """

    num_units: int
    home_bytes: int
    pinned_bytes: int
    slot_bytes: int
    num_slots: int
    here_bytes: int
    saved_bytes: int
    num_loads: int
    num_late: int
    copied_bytes: int
    to_device_bytes_per_second: float | None
    exposed_seconds: float
    is_simulated: bool = False

    def __str__(self) -> str:
        meanings = dict(_MEANINGS)
        if self.is_simulated:
            meanings |= {name: meanings[name] + _SIMULATED for name in _TIMED}
        return format_figures("frozen parameters that stream", self, meanings)
