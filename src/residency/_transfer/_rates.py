"""The rate of the link between page-locked host memory and a device, measured."""

from __future__ import annotations

import torch

from residency import _device
from residency._pinned import allocate_pinned
from residency._transfer._events import seconds_between
from residency._transfer._lanes import copy_on, lanes_of

_NUM_COPIES = 5  # the first of them warms up


def link_rates(device: torch.device, num_bytes: int) -> tuple[float, float]:
    """Measures copies one at a time, with nothing beside them; blocks the host.

    Args:
        device: The accelerator; it is used.
        num_bytes: Of each copy.

    Returns:
        The best rate to the device and from it, in bytes per second.

    Raises:
        torch.OutOfMemoryError: The device has no room for ``num_bytes``.

    Memory:
        ``num_bytes`` on the device and as many of page-locked host memory, until it returns.
    """
    on_host, lanes = allocate_pinned(num_bytes), lanes_of(device)
    on_device = _device.unfilled_bytes(num_bytes, device)
    _device.synchronize(device)  # the lanes are other streams than the one that allocated
    best = []
    for lane, pair in ((lanes.h2d, (on_device, on_host)), (lanes.d2h, (on_host, on_device))):
        seconds = []
        for _ in range(_NUM_COPIES):
            start = lanes.mark(lane, timed=True)
            copy_on(lane, [pair])
            seconds.append(seconds_between(start, lanes.mark(lane, timed=True)))
        best.append(min(seconds[1:]))
    return num_bytes / best[0], num_bytes / best[1]
