"""Registers ``simccl``, the collectives of the simulated accelerator, with ``torch.distributed``.

It is gloo between processes, so every rank needs gloo and nothing else; what the compiled part adds
is that a collective obeys the device's streams and its race checker.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import distributed as data_parallel

_NAME = "simccl"
_DEVICE = "sim"


def register(core: Any) -> None:
    """Makes ``simccl`` the backend of the device.

    ``init_process_group()``, ``("simccl")`` and ``("cpu:gloo,sim:simccl")`` find it.
    """

    def make_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        return core.Simccl(dist.ProcessGroupGloo(store, rank, size, timeout))

    dist.Backend.register_backend(_NAME, make_group, devices=[_DEVICE])
    _be_the_default()


def _be_the_default() -> None:
    """Names the backend where a group is made without one.

    Torch calls the default of such a group gloo unless it is NCCL, whatever the accelerator's
    backend is, and what asks the group for its default then finds none.
    Source: ``_new_process_group_helper``, torch 2.13.
    """
    names: Any = vars(distributed_c10d)
    make = names[
        "_new_process_group_helper"
    ]  # who calls init_process_group and new_group by any name

    @functools.wraps(make)
    def make_named(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(make).bind(*args, **kwargs)
        if bound.arguments["backend"] == dist.Backend.UNDEFINED:
            bound.arguments["backend"] = dist.Backend(_NAME)
        return make(*bound.args, **bound.kwargs)

    names["_new_process_group_helper"] = make_named


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
