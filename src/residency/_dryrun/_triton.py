"""Triton's kernels in a dry run, such as those of TRL and Liger: a launch runs nothing.

A kernel works in tensors that its caller has made, and takes no device memory of its own, so that
what is around the launches is all that counts. What it would write is not known; a tensor whose
values were known keeps them. To choose among an autotuned kernel's settings, Triton calls each with
a buffer at hand that clears the GPU's cache: so does this, with the first one for the best.

Left out: memory that a kernel asks for by ``triton.set_allocator``, and what the driver takes for a
kernel's code. Out of dry mode Triton's own errors come, as there is no driver.

Source: ``triton/runtime`` and ``triton/testing.py`` of Triton 3.7.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import torch

from residency._dryrun._methods import around
from residency._memory import ImportWatch
from residency._units import MIB

_CACHE_BYTES = 256 * MIB  # of Triton's driver for CUDA
_WARP_SIZE = 32


def launch_nothing() -> None:
    """Gives Triton a driver, once a script imports it, whose launches run nothing."""
    watched = {"triton.runtime.jit": _watch_launches, "triton.testing": _watch_benchmarks}
    ImportWatch(watched).start()


def _watch_launches(module: ModuleType) -> None:
    names = vars(module)
    names["driver"].set_active(_Driver())
    kernel: Any = names["JITFunction"]
    kernel.run = _launching(kernel.run)


def _watch_benchmarks(module: ModuleType) -> None:
    module.__dict__["do_bench"] = _bench


def _launching(run: Callable[..., object]) -> Callable[..., object]:
    @around(run)
    def launched(self: Any, *args: object, grid: object, warmup: bool, **options: object) -> object:
        if not any(map(_is_on_device, (*args, *options.values()))):
            return run(self, *args, grid=grid, warmup=warmup, **options)
        for hook in self.pre_run_hooks:
            hook(*args, **options)
        return None

    return launched


def _is_on_device(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def _bench(
    call: Callable[[], object],
    warmup: int = 25,
    rep: int = 100,
    grad_to_none: Iterable[torch.Tensor] | None = None,
    quantiles: Sequence[float] | None = None,
    return_mode: str = "mean",
) -> float | list[float]:
    """Calls a function as Triton does to time it, and returns times that are all alike."""
    call()
    cache = _Driver.get_empty_cache_for_benchmark()
    for each in grad_to_none or ():
        each.grad = None
    call()
    del cache
    if quantiles is not None:
        return [1.0] * len(quantiles) if len(quantiles) != 1 else 1.0
    return [1.0] if return_mode == "all" else 1.0


def _cuda() -> Any:
    return torch.get_device_module("cuda")


class _Utilities:
    """The part of Triton's driver that knows devices."""

    @staticmethod
    def get_device_properties(device: int) -> dict[str, int]:
        """Returns the figures that kernels choose their grids and blocks by."""
        properties: Any = _cuda().get_device_properties(device)
        return {
            "max_shared_mem": properties.shared_memory_per_block_optin,
            "max_num_regs": properties.regs_per_multiprocessor,
            "multiprocessor_count": properties.multi_processor_count,
            "warpSize": _WARP_SIZE,
        }


class _Driver:
    """A driver in the place of Triton's for CUDA."""

    utils = _Utilities()

    @staticmethod
    def get_device_interface() -> ModuleType:
        """Returns the module of the device's functions."""
        module: ModuleType = _cuda()
        return module

    @staticmethod
    def get_active_torch_device() -> torch.device:
        """Returns the current device."""
        return torch.device("cuda", _Driver.get_current_device())

    @staticmethod
    def get_current_device() -> int:
        """Returns the index of the current device."""
        return torch.accelerator.current_device_index()

    @staticmethod
    def get_current_stream(device: int) -> int:
        """Returns the handle of the current stream."""
        return torch.accelerator.current_stream(device).stream_id

    @staticmethod
    def get_device_capability(device: int | None = None) -> tuple[int, int]:
        """Returns the compute capability."""
        major, minor = _cuda().get_device_capability(device)
        return major, minor

    @staticmethod
    def get_current_target() -> object:
        """Returns what Triton would compile for."""
        compiler: Any = importlib.import_module("triton.backends.compiler")
        major, minor = _Driver.get_device_capability()
        target: object = compiler.GPUTarget("cuda", major * 10 + minor, _WARP_SIZE)
        return target

    @staticmethod
    def get_benchmarker() -> Callable[..., object]:
        """Returns what settings of a kernel are compared with."""
        return _bench

    @staticmethod
    def get_empty_cache_for_benchmark() -> torch.Tensor:
        """Returns the buffer that Triton clears the GPU's cache with."""
        return torch.empty(_CACHE_BYTES // 4, dtype=torch.int, device="cuda")

    @staticmethod
    def clear_cache(cache: torch.Tensor) -> None:
        """Clears the GPU's cache."""
        cache.zero_()
