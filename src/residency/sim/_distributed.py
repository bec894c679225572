"""Registers ``simccl``, the collectives of the simulated accelerator, with ``torch.distributed``.

It is gloo between processes, so every rank needs gloo and nothing else; what the compiled part adds
is that a collective obeys the device's streams and its race checker.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

_NAME = "simccl"
_DEVICE = "sim"


def register(core: Any) -> None:
    """Makes ``simccl`` the backend of the device.

    ``init_process_group("cpu:gloo,sim:simccl")`` and ``init_process_group("simccl")`` find it.
    """

    def make_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        return core.wrap_gloo(dist.ProcessGroupGloo(store, rank, size, timeout))

    dist.Backend.register_backend(_NAME, make_group, devices=[_DEVICE])
