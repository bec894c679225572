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
from residency._dryrun._methods import Function, put_around
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
    for name in ("__init__", "_rebuild_buckets"):
        put_around(vars(dist)["Reducer"], name)(_in(making, GRADIENTS))
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
    for name in ("unshard", "wait_for_unshard"):
        put_around(module.FSDPParamGroup, name)(_in(making, GATHERED))

    @put_around(module, "foreach_reduce")
    def reduced(
        reduce: Function, of: object, whole: Any, *args: object, **options: object
    ) -> object:
        with making(GRADIENTS, _addresses(whole)):  # of the gradients, which go into its buffer
            return reduce(of, whole, *args, **options)


def _watch_flat_parameters(making: Making, module: ModuleType) -> None:
    """Watches the first FSDP, whose parameters are one flat tensor of each module.

    Beside what it gathers into, this rank's share is on the device in the type that is gathered,
    where the share that stays is on the host or of another type. The first pass makes all of these
    buffers once, in their sizes, and lets them go.
    """
    for name in ("init_flat_param_attributes", "pre_unshard", "unshard"):
        put_around(module.FlatParamHandle, name)(_in(making, GATHERED))


def _watch_flat_gradients(making: Making, module: ModuleType) -> None:
    """Watches where its whole gradients, which autograd has made, go into shards.

    They may get another type first, in which they are summed.
    """

    @put_around(module, "_post_backward_hook")
    def going_on(
        go_on: Function, state: object, handle: Any, *args: object, **options: object
    ) -> object:
        with making(GRADIENTS, _addresses([handle.flat_param.grad])):
            return go_on(state, handle, *args, **options)


def _in(making: Making, kind: str) -> Callable[..., object]:
    def called(function: Function, *args: object, **options: object) -> object:
        with making(kind, ()):
            return function(*args, **options)

    return called


def _addresses(tensors: Iterable[object]) -> Iterator[int]:
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            yield tensor.untyped_storage().data_ptr()
