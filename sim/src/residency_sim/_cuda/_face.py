"""Lets the simulated accelerator stand where CUDA does: torch's ``cuda`` device and ``nccl``.

The compiled part takes CUDA's dispatch key; this gives ``torch.cuda`` what it calls below itself,
so that scripts and frameworks that say ``cuda`` run as they are. One process does this once, before
anything has used ``torch.cuda``, and it cannot be undone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from residency._errors import SimulatorError
from residency_sim import _allocator
from residency_sim._cuda import _bindings, _graphs, _kernels, _tensor_types, _types
from residency_sim._gpus import Gpu

NAME = "cuda"
_CUDA_VERSION = "13.0"  # which torch on PyPI is built with (2.11 to 2.13)
_CUDNN_VERSION = 92000  # which torch 2.13 on PyPI brings


def check_free() -> None:
    """Refuses where something else is ``cuda`` in this process already.

    Raises:
        SimulatorError: ``torch.cuda`` is in use, or torch sees a real GPU.
    """
    is_used: Any = torch.cuda.is_initialized  # torch does not annotate it
    if is_used():
        raise SimulatorError(
            "torch.cuda has been used in this process already; "
            "call residency.sim.enable(device='cuda') before anything uses it."
        )
    if torch.cuda.is_available():
        raise SimulatorError(
            "torch sees a real CUDA device, and the simulated one would stand in its place. "
            "Hide it with CUDA_VISIBLE_DEVICES= in the environment, or simulate the device 'sim'."
        )


def register(core: Any, model: Callable[[], Gpu], is_dry: Callable[[], bool]) -> None:
    """Gives torch the Python side of the device; the compiled one is registered already.

    Args:
        core: The compiled module.
        model: Says which GPU the device stands for.
        is_dry: Says whether kernels run for their shapes only.
    """
    _types.install(core, model)
    _tensor_types.install()
    names = _bindings.bindings(core) | _kernels.bindings(is_dry)
    torch._C.__dict__.update(names, _has_cuda=True)
    # What these modules took from torch._C when they were imported.
    torch.cuda.__dict__.update(
        _exchange_device=names["_cuda_exchangeDevice"],
        _maybe_exchange_device=names["_cuda_maybeExchangeDevice"],
        _is_in_bad_fork=core.is_in_bad_fork,
        _device_count_nvml=core.num_devices,  # which leaves a process able to fork
    )
    _graphs.install(core)
    _kernels.keep_from_fusing()
    if torch.version.cuda is None:
        torch.version.__dict__["cuda"] = _CUDA_VERSION
    pools = _allocator.functions(core)
    shown = ("MemPool", "use_mem_pool")
    torch.cuda.__dict__.update({name: pools[name] for name in shown})
    _show_cudnn()
    _teach_storages(core)
    if dist.is_available():
        _offer_nccl(core)


def _show_cudnn() -> None:
    """Shows torch one version of cuDNN, whichever the build has; no kernel of it runs."""
    torch.backends.cudnn.enabled = False
    names: dict[str, Any] = torch.backends.cudnn.version.__globals__  # those of torch's own module
    names.update(_init=lambda: True, __cudnn_version=_CUDNN_VERSION)
    torch._C.__dict__["_has_cudnn"] = True


def _teach_storages(core: Any) -> None:
    """Lets storages be made and resized on the device: torch compiles that in with CUDA only."""
    storages: Any = torch.UntypedStorage
    make, resize = storages.__new__, storages.resize_

    def make_any(cls: Any, *args: Any, device: Any = None, **options: Any) -> Any:
        if device is None or torch.device(device).type != NAME:
            return make(cls, *args, device=device, **options)
        if args and not isinstance(args[0], int):
            host = make(cls, *args, **options)
            return make_any(cls, host.nbytes(), device=device).copy_(host)
        num_bytes = args[0] if args else options.get("size", 0)
        return torch.empty(num_bytes, dtype=torch.uint8, device=device).untyped_storage()

    def resize_any(self: Any, num_bytes: int) -> Any:
        if self.device.type != NAME:
            return resize(self, num_bytes)
        core.resize_storage(self, int(num_bytes))
        return self

    storages.__new__ = staticmethod(make_any)
    storages.resize_ = resize_any
    share = _bindings.refuse("tensors that processes share")
    storages._share_cuda_ = storages._new_shared_cuda = share


# ---------------------------------------------------------------------------------- nccl


def _offer_nccl(core: Any) -> None:
    from torch.distributed import constants, distributed_c10d

    timeout = timedelta(minutes=10)
    group = _make_nccl(core.Simccl)
    for module in (dist, distributed_c10d, sys.modules["torch._C._distributed_c10d"]):
        module.__dict__["ProcessGroupNCCL"] = group
        if "ProcessGroupNCCL2" in vars(module):  # torch 2.15's own, which it takes by default
            module.__dict__["ProcessGroupNCCL2"] = group
    for module in (constants, distributed_c10d):
        module.__dict__["default_pg_nccl_timeout"] = timeout
    distributed_c10d.__dict__["_NCCL_AVAILABLE"] = True


def _make_nccl(simccl: Any) -> Any:
    """Makes the class that torch asks for a group of NCCL: gloo moves the bytes."""

    class NcclOptions:
        """The options that a group is made with; of all this, gloo obeys the timeout."""

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config = SimpleNamespace()
            self.global_ranks_in_group: list[int] = []
            self.group_name = ""
            self._timeout = timedelta(minutes=10)

    class NcclType(type):
        """A type that knows a group by the compiled class that it is of."""

        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, simccl)

    class ProcessGroupNCCL(metaclass=NcclType):
        """The class whose groups answer to the name."""

        Options = NcclOptions

        @staticmethod
        def of_host_group(group: Any) -> Any:
            """Returns a group whose bytes another group moves, one of host tensors."""
            return simccl(group)

        def __new__(
            cls, store: Any, rank: int, size: int, options: Any = None, device_id: Any = None
        ) -> Any:
            given = options if options is not None else NcclOptions()
            timeout = given if isinstance(given, timedelta) else given._timeout
            return simccl(dist.ProcessGroupGloo(store, rank, size, timeout))

    return ProcessGroupNCCL
