"""The accelerator that a benchmark runs on."""

from __future__ import annotations

import time
from typing import Any

import torch

from residency import _device, sim
from residency.testing import simulated_device_type


def find_device(*arguments: Any, **options: Any) -> torch.device:
    """Returns this machine's accelerator, or where there is none the simulated one.

    Args:
        arguments: What ``residency.sim.enable`` takes, as do ``options``. Where
            ``RESIDENCY_TEST_DEVICE`` is ``sim-as-cuda`` it stands in CUDA's place.
    """
    found = _device.accelerator()
    if found is not None:
        return found
    given = {"device": simulated_device_type() or "sim", **options}
    return sim.enable(*arguments, **given)


def now() -> float:
    """Returns the seconds of the simulated clock, or of the host's where the device is a card."""
    return sim.now_seconds() if sim.is_enabled() else time.perf_counter()
