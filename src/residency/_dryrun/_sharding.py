"""Gives the buffers of sharded and of data-parallel training their kinds. FSDP gathers parameters
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
from residency._dryrun._methods import around
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
    # FSDP has no public hook between an all-gather and the pass that needs it.
    fsdp = "torch.distributed.fsdp"
    watched = {
        f"{fsdp}._fully_shard._fsdp_param_group": _watch_groups,
        f"{fsdp}._flat_param": _watch_flat_parameters,
        f"{fsdp}._runtime_utils": _watch_flat_gradients,
    }
    watches = {name: functools.partial(watch, making) for name, watch in watched.items()}
    ImportWatch(watches).start()


def _watch_groups(making: Making, module: ModuleType) -> None:
    group: Any = vars(module)["FSDPParamGroup"]
    for name in ("unshard", "wait_for_unshard"):
        setattr(group, name, _in(making, GATHERED, getattr(group, name)))
    module.__dict__["foreach_reduce"] = _reducing(making, vars(module)["foreach_reduce"])


def _watch_flat_parameters(making: Making, module: ModuleType) -> None:
    """Watches the first FSDP, whose parameters are one flat tensor of each module.

    Beside what it gathers into, this rank's share is on the device in the type that is gathered,
    where the share that stays is on the host or of another type. The first pass makes all of these
    buffers once, in their sizes, and lets them go.
    """
    handle: Any = vars(module)["FlatParamHandle"]
    for name in ("init_flat_param_attributes", "pre_unshard", "unshard"):
        setattr(handle, name, _in(making, GATHERED, getattr(handle, name)))


def _watch_flat_gradients(making: Making, module: ModuleType) -> None:
    """Watches where its whole gradients, which autograd has made, go into shards.

    They may get another type first, in which they are summed.
    """
    go_on = vars(module)["_post_backward_hook"]

    @around(go_on)
    def going_on(state: object, handle: Any, *args: object, **options: object) -> object:
        with making(GRADIENTS, _addresses([handle.flat_param.grad])):
            return go_on(state, handle, *args, **options)

    module.__dict__["_post_backward_hook"] = going_on


def _in(making: Making, kind: str, function: Callable[..., object]) -> Callable[..., object]:
    @around(function)
    def called(*args: object, **options: object) -> object:
        with making(kind, ()):
            return function(*args, **options)

    return called


def _reducing(making: Making, reduce: Callable[..., object]) -> Callable[..., object]:
    @around(reduce)
    def reduced(of: object, whole: Any, *args: object, **options: object) -> object:
        with making(GRADIENTS, _addresses(whole)):  # of the gradients, which go into its buffer
            return reduce(of, whole, *args, **options)

    return reduced


def _addresses(tensors: Iterable[object]) -> Iterator[int]:
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            yield tensor.untyped_storage().data_ptr()
