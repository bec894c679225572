"""How many bytes of a device the run's own memory leaves for good: ``resident="auto"``.

State that stays lies in segments of its own, in the pool of a copy lane, and so never among the
run's tensors. What the run itself may come to reserve is free besides,

    base + (most - base) * 10 ** (6 / n)

``most`` is the most that it has reserved, ``base`` what a step finds allocated, and ``n`` how many
passes have been seen. If lengths are drawn evenly up to some longest one, whichever that is, the
chance that ``n`` of them are all so short that the longest is beyond this is one in a million.
"""

from __future__ import annotations

import torch
from torch import Tensor

from residency import _device
from residency._optim._overlap import _blocks
from residency._transfer import lanes_of, on_lane

_LEAST_GROWTH = 1.05


def growth(num_seen: int) -> float:
    """Returns how many times as large the passes to come may be as those that have been seen."""
    return float(max(10 ** min(6 / max(num_seen, 1), 9), _LEAST_GROWTH))


class Reserve:
    """The segments of a device: those of the run, and those of the state that stays.

    Args:
        device: An accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: object = None  # of the state that stays, as the allocator names it
        self._reserved = -1
        self._of_run = self._of_state = self._most = 0

    def room(self, base: int, num_seen: int) -> int:
        """Returns how many bytes of state may stay on the device, those that do included."""
        free = _device.device_room(self._device)
        if free is None:
            return 0
        self._look()
        self._most = max(self._most, self._of_run)
        base = min(base, self._most)
        wanted = base + int((self._most - base) * growth(num_seen))
        return self._of_state + free[0] - max(wanted - self._of_run, 0)

    def take(self, num_bytes: int) -> Tensor | None:
        """Takes memory of its own for state that stays; None if the device has none."""
        try:
            with on_lane(lanes_of(self._device).h2d):
                memory = _device.unfilled_bytes(num_bytes, self._device)
        except torch.OutOfMemoryError:
            return None
        if self._stream is None:
            self._stream = _blocks.stream_of(self._device, memory.data_ptr())
        return memory

    def _look(self) -> None:
        reserved = _blocks.reserved_bytes(self._device)
        if reserved == self._reserved:
            return
        self._reserved = reserved
        self._of_run = self._of_state = 0
        for segment in _device.memory_segments(self._device) or ():
            if self._stream is not None and segment["stream"] == self._stream:
                self._of_state += segment["total_size"]
            else:
                self._of_run += segment["total_size"]
