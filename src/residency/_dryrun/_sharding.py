"""Gives the buffers of sharded and of data-parallel training their kinds. FSDP2 gathers parameters
and lets them go inside one pass, where no look at its end finds them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from residency._dryrun._books import GATHERED
from residency._dryrun._owners import GRADIENTS
from residency._memory import ImportWatch

Making = Callable[[str, Iterable[int]], AbstractContextManager[None]]


def watch_buffers(making: Making) -> None:
    """Watches the calls that make such buffers.

    Args:
        making: Gives a kind to the blocks that are made inside, and to those at addresses.
    """
    if not dist.is_available():
        return
    # A bucket's block is made when DDP groups its gradients, which torch does in C++ alone: there
    # is no public name for it.
    reducer: Any = vars(dist)["Reducer"]
    for name in ("__init__", "_rebuild_buckets"):
        setattr(reducer, name, _in(making, GRADIENTS, getattr(reducer, name)))
    # FSDP2 has no public hook between an all-gather and the pass that needs it.
    groups = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
    ImportWatch({groups: functools.partial(_watch_groups, making)}).start()


def _watch_groups(making: Making, module: ModuleType) -> None:
    group: Any = vars(module)["FSDPParamGroup"]
    for name in ("unshard", "wait_for_unshard"):
        setattr(group, name, _in(making, GATHERED, getattr(group, name)))
    # Its second argument is a list of the whole gradients, which then go into its buffer.
    module.__dict__["foreach_reduce"] = _in(making, GRADIENTS, vars(module)["foreach_reduce"])


def _in(making: Making, kind: str, function: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(function)
    def called(*args: object, **options: object) -> object:
        whole = args[1] if len(args) > 1 and kind == GRADIENTS else ()
        with making(kind, _addresses(whole) if isinstance(whole, list) else ()):
            return function(*args, **options)

    return called


def _addresses(tensors: Iterable[object]) -> Iterator[int]:
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            yield tensor.untyped_storage().data_ptr()
