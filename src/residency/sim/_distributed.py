"""Registers ``simccl``, the collectives of the simulated accelerator, with ``torch.distributed``.

It is gloo between processes, so every rank needs gloo and nothing else; what the compiled part adds
is that a collective obeys the device's streams and its race checker.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import distributed as data_parallel

_NAME = "simccl"
_DEVICE = "sim"


def register(core: Any) -> None:
    """Makes ``simccl`` the backend of the device.

    ``init_process_group("cpu:gloo,sim:simccl")`` and ``init_process_group("simccl")`` find it.
    """

    def make_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        return core.Simccl(dist.ProcessGroupGloo(store, rank, size, timeout))

    dist.Backend.register_backend(_NAME, make_group, devices=[_DEVICE])


def let_data_parallel_run_dry(is_dry: Callable[[], bool]) -> None:
    """Lets DistributedDataParallel train in dry mode.

    It sends the shapes of its parameters through the device to compare them, and after the first
    step the order of its buckets, which then stays the first one: in dry mode no byte there is
    real.
    """
    names: Any = vars(data_parallel)
    verify = names["_verify_param_shape_across_processes"]

    def verify_what_is_real(*args: object, **kwargs: object) -> object:
        return None if is_dry() else verify(*args, **kwargs)

    names["_verify_param_shape_across_processes"] = verify_what_is_real
    reducer: Any = vars(dist)["Reducer"]
    rebuild = reducer._rebuild_buckets

    def rebuild_what_is_real(self: object) -> bool:
        return False if is_dry() else rebuild(self)

    reducer._rebuild_buckets = rebuild_what_is_real
