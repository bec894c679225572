"""The functions that torch's C++ gives to ``torch.cuda`` and a build without CUDA lacks.

``torch.cuda`` stays torch's own: what is in here are the functions of ``torch._C`` that it calls.
Those that are left out have nothing behind them in the simulator, and are missing by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from residency._errors import SimulatorError
from residency_sim import _allocator
from residency_sim._cuda import _communication
from residency_sim._cuda._types import DEVICE_TYPE, CudaDeviceProperties

_CUDNN_TRIALS = 10  # torch's default of `torch.backends.cudnn.benchmark_limit`
NCCL_VERSION = (2, 27, 5)  # a placeholder, of the release that torch 2.13 is built with


def bindings(core: object) -> dict[str, Callable[..., Any]]:
    """Returns the functions by their names in ``torch._C``."""
    return {
        **_device_bindings(core),
        **_stream_bindings(core),
        **_memory_bindings(core),
        **_history_bindings(core),
        **_communication.bindings(),
        **_unmodelled_bindings(),
    }


def _device_bindings(core: Any) -> dict[str, Callable[..., Any]]:
    def initialise() -> None:
        core.initialize()  # refused in a forked child
        properties = CudaDeviceProperties()
        torch.cuda.__dict__.update(
            default_generators=(core.default_generator(),) * core.num_devices(),
            _get_device_properties=lambda device: properties,
        )

    def count() -> int:
        core.poison_fork()
        return int(core.num_devices())

    def arch_flags() -> str:
        core.poison_fork()
        properties = CudaDeviceProperties()
        return f"sm_{properties.major}{properties.minor}"

    def exchanged(exchange: Callable[[int], int]) -> Callable[[int], int]:
        return lambda device: -1 if device < 0 else exchange(device)

    def set_device(device: int) -> None:
        torch.accelerator.set_device_index(device)

    major, minor, patch = NCCL_VERSION
    trials = [_CUDNN_TRIALS]
    return {
        "_cuda_init": initialise,
        "_cuda_isInBadFork": core.is_in_bad_fork,
        "_cuda_getDeviceCount": count,
        "_cuda_getDevice": lambda: torch.accelerator.current_device_index(),
        "_cuda_setDevice": set_device,
        "_cuda_exchangeDevice": exchanged(core.exchange_device),
        "_cuda_maybeExchangeDevice": exchanged(core.maybe_exchange_device),
        "_cuda_hasPrimaryContext": core.has_context,
        "_cuda_canDeviceAccessPeer": lambda device, peer: False,
        "_cuda_getArchFlags": arch_flags,
        # `torch.cuda.synchronize` calls it: the caller waits for all that it has queued.
        "_cuda_synchronize": lambda: torch.accelerator.synchronize(),
        "_cuda_ipc_collect": lambda: None,
        "_cuda_get_sync_debug_mode": lambda: 0,
        "_cuda_getCurrentBlasHandle": lambda: 0,
        "_cuda_getCurrentSolverHandle": lambda: 0,
        "_cuda_clearCublasWorkspaces": core.clear_workspaces,
        "_cuda_get_cudnn_benchmark_limit": lambda: trials[0],
        "_cuda_set_cudnn_benchmark_limit": functools.partial(trials.__setitem__, 0),
        "_is_flash_attention_available": lambda: True,  # its memory is modelled
        "_nccl_version": lambda: major << 32 | minor << 16 | patch,
        "_nccl_version_suffix": lambda: b"",
    }


def _stream_bindings(core: Any) -> dict[str, Callable[..., Any]]:
    def current(device: int) -> tuple[int, int, int]:
        return torch.accelerator.current_stream(device).stream_id, device, DEVICE_TYPE

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        torch.accelerator.set_stream(_stream(stream_id, device_index))

    return {
        "_cuda_getCurrentStream": current,
        "_cuda_getDefaultStream": lambda device: (0, device, DEVICE_TYPE),
        "_cuda_getCurrentRawStream": lambda device: current(device)[0],
        "_cuda_getStreamFromExternal": lambda handle, device: (handle, device, DEVICE_TYPE),
        "_cuda_setStream": set_stream,
        "_cuda_isCurrentStreamCapturing": core.is_capturing,
        "_cuda_sleep": lambda cycles: None,
    }


def _memory_bindings(core: Any) -> dict[str, Callable[..., Any]]:
    # These are bindings of torch's own, which it does not annotate.
    stats_of: Any = torch._C._accelerator_getDeviceStats
    reset_accumulated: Any = torch._C._accelerator_resetAccumulatedStats
    reset_peak: Any = torch._C._accelerator_resetPeakStats

    def stats(device: int) -> dict[str, Any]:
        figures: dict[str, Any] = stats_of(device)
        if core.names_private_pools and device in (-1, core.machine_index()):
            figures["reserved_bytes_by_private_pools"] = core.private_pool_stats()
        return figures | {"num_oom_rejections": 0}  # no policy of this device's rejects beforehand

    def allocate(num_bytes: int, stream: int) -> int:
        previous = torch.accelerator.current_stream()
        torch.accelerator.set_stream(_stream(stream, previous.device_index))
        try:
            address: int = core.allocate(num_bytes)
        finally:
            torch.accelerator.set_stream(previous)
        return address

    return {
        "_cuda_memoryStats": stats,
        "_cuda_resetAccumulatedMemoryStats": lambda device: reset_accumulated(device),
        "_cuda_resetPeakMemoryStats": lambda device: reset_peak(device),
        "_cuda_getMemoryFraction": lambda device: core.memory_fraction(),
        "_cuda_setMemoryFraction": lambda fraction, device: core.set_memory_fraction(fraction),
        "_cuda_emptyCache": lambda: torch.accelerator.empty_cache(),
        "_cuda_hostMemoryStats": core.host_memory_stats,
        "_host_emptyCache": core.empty_pinned_cache,
        "_cuda_resetAccumulatedHostMemoryStats": core.reset_accumulated_host_memory_stats,
        "_cuda_resetPeakHostMemoryStats": lambda: core.reset_peak_pinned_memory_stats(),
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
        "_cuda_cudaCachingAllocator_raw_alloc": allocate,
        "_cuda_cudaCachingAllocator_raw_delete": core.free,
        "_graph_pool_handle": _allocator.new_pool_id,
    }


def _history_bindings(core: Any) -> dict[str, Callable[..., Any]]:
    def snapshot(asked: tuple[Any, ...] | None) -> dict[str, Any]:
        first, second, with_traces, *_ = (*(asked or _allocator.DEFAULT_POOL), True)
        shown: dict[str, Any] = core.snapshot((first, second), with_traces)
        return shown

    def record_as_before(
        enabled: bool,
        with_stacks: bool,
        max_entries: int,
        with_stacks_of_events: bool,
        with_cpp: bool,
        *options: Any,
    ) -> None:
        context = "alloc" if with_stacks_of_events else "state" if with_stacks else None
        stacks = "all" if with_cpp else "python"
        core.record_history("all" if enabled else None, context, stacks, max_entries, *options)

    return {
        "_cuda_memorySnapshot": snapshot,
        "_cuda_record_memory_history": core.record_history,
        "_cuda_record_memory_history_legacy": record_as_before,
        "_cuda_attach_out_of_memory_observer": core.attach_observer,
        "_cuda_allocationTraceback": core.stack_of_allocation,
        "_cuda_setMemoryMetadata": core.set_memory_metadata,
        "_cuda_getMemoryMetadata": core.memory_metadata,
    }


def refuse(what: str) -> Callable[..., Any]:
    """Returns a function that says that ``what`` is not modelled, whatever it is called with."""

    def refused(*args: object, **kwargs: object) -> object:
        raise SimulatorError(f"The simulated accelerator does not model {what}.")

    return refused


def _unmodelled_bindings() -> dict[str, Callable[..., object]]:
    return {
        "_cuda_set_sync_debug_mode": refuse("the debug mode of synchronisations"),
        "_cuda_changeCurrentAllocator": refuse("other allocators"),
        "_cuda_cudaCachingAllocator_enable": refuse("a device without a caching allocator"),
        # Torch's compiler asks for the name when it is reset.
        "_cuda_CUDAAllocator_AllocatorState": refuse("states of pools"),
    }


def _stream(stream_id: int, index: int) -> torch.Stream:
    return torch.Stream(stream_id=stream_id, device_index=index, device_type=DEVICE_TYPE)
