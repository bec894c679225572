"""The figures of one offloaded optimizer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OffloadStatistics:
    """Holds the figures of one offloaded optimizer at one moment.

    Attributes:
        home_bytes: Bytes of the state that lives on the host, ``numel * itemsize``.
        pinned_bytes: Bytes of page-locked host memory that hold it.
        resident_bytes: Bytes of the state that stays on the device.
        slot_bytes: Bytes of one device buffer in the newest step.
        num_slots: Device buffers at most in use at once.
        num_buckets: Units that the newest step moved.
        num_steps: Steps taken since the offload.
        copied_to_device_bytes: Bytes copied to the device by steps so far.
        copied_to_host_bytes: Bytes copied to the host by steps so far.
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
