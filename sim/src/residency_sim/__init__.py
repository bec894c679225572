"""A simulated accelerator: a torch device whose memory is the host's and whose rules are CUDA's.

``enable()`` registers it as the device ``sim``, or in the place of ``cuda``. It has CUDA's caching
allocator, a capacity, streams whose work runs only when something forces it, pinned memory, and a
checker that raises if two operations touch the same bytes with no wait between them. Kernels are
torch's CPU kernels.

It exists so that code which moves memory can be tested without a GPU: a missing wait gives wrong
bytes or an error every time instead of once a week. There is one such device in a process, and
registering it cannot be undone; every setting can be changed again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency._errors import BuildError, RaceError, SimulatorError
from residency._lazy import door

if TYPE_CHECKING:
    from residency_sim._clock import Clock
    from residency_sim._enable import (
        build,
        enable,
        is_built,
        is_enabled,
        now_seconds,
        pinned_memory_stats,
        reset_peak_pinned_memory_stats,
        settings,
    )
    from residency_sim._gpus import Gpu, gpu_named

__all__ = [
    "BuildError",
    "Clock",
    "Gpu",
    "RaceError",
    "SimulatorError",
    "build",
    "enable",
    "gpu_named",
    "is_built",
    "is_enabled",
    "now_seconds",
    "pinned_memory_stats",
    "reset_peak_pinned_memory_stats",
    "settings",
]


__getattr__ = door(
    __name__,
    {
        "_clock": ["Clock"],
        "_enable": [
            "build",
            "enable",
            "is_built",
            "is_enabled",
            "now_seconds",
            "pinned_memory_stats",
            "reset_peak_pinned_memory_stats",
            "settings",
        ],
        "_gpus": ["Gpu", "gpu_named"],
    },
)
