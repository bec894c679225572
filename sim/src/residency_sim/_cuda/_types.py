"""The classes that torch's C++ gives to ``torch.cuda`` and a build without CUDA lacks.

``torch.cuda.Stream`` and ``torch.cuda.Event`` are torch's own classes, made anew over the bases in
here; the properties of the device are placeholders, chosen so that libraries take their plain
paths.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from residency_sim._gpus import Gpu

DEVICE_TYPE = 1  # of CUDA in c10::DeviceType


class CudaStreamBase(torch.Stream):
    """The base class of ``torch.cuda.Stream``."""

    def __new__(cls, priority: int = 0, stream_ptr: int = 0, **existing: Any) -> CudaStreamBase:
        """Makes a stream, or wraps the one that ``stream_id`` and its fellows name."""
        if stream_ptr:
            index = torch.accelerator.current_device_index()
            existing = {"stream_id": stream_ptr, "device_index": index, "device_type": DEVICE_TYPE}
        if existing:
            return super().__new__(cls, **existing)
        index = torch.accelerator.current_device_index()
        return super().__new__(cls, device=torch.device("cuda", index), priority=priority)

    @property
    def cuda_stream(self) -> int:
        """A number that stands for the handle of CUDA's stream; 0 for the default one."""
        return self.stream_id

    @property
    def priority(self) -> int:
        """Always 0: simulated streams have no priorities."""
        return 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Returns the least and the greatest priority, as an A100 has them."""
        return 0, -5


class CudaEventBase(torch.Event):
    """The base class of ``torch.cuda.Event``."""

    _elapsed: Any = None  # of two handles, in milliseconds; set by `install`
    _is_timed: bool

    def __new__(
        cls,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> CudaEventBase:
        """Makes an event that is not recorded yet."""
        event = super().__new__(cls, "cuda", enable_timing=enable_timing)
        event._is_timed = enable_timing
        return event

    @property
    def cuda_event(self) -> int:
        """The handle of the event; 0 before it is recorded."""
        return self.event_id

    def elapsed_time(self, end_event: Any) -> float:
        """Returns the milliseconds from this event to a later one."""
        if not (self._is_timed and end_event._is_timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self.event_id and end_event.event_id):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        milliseconds: float = CudaEventBase._elapsed(self.event_id, end_event.event_id)
        return milliseconds


def _model() -> Gpu:
    model: Gpu = CudaDeviceProperties._model()
    return model


class CudaDeviceProperties:
    """The answer of ``get_device_properties``: name, memory, capability and multiprocessors of the
    GPU that is named, the rest an A100's.
    """

    _core: Any = None  # these two are set by `install`
    _model: Any = None

    warp_size = 32
    max_threads_per_block = 32 * warp_size
    regs_per_multiprocessor = 1 << 16
    shared_memory_per_block = 48 << 10
    shared_memory_per_block_optin = 163 << 10
    shared_memory_per_multiprocessor = 164 << 10
    L2_cache_size = 40 << 20
    is_integrated = is_multi_gpu_board = 0
    pci_bus_id = pci_device_id = pci_domain_id = 0
    gcnArchName = ""  # noqa: N815 - torch's spelling
    uuid = "GPU-simulated"

    @property
    def name(self) -> str:
        """What the device is called; that it is simulated, where no GPU is named."""
        return _model().title

    @property
    def major(self) -> int:
        """The first number of the compute capability."""
        return _model().capability[0]

    @property
    def minor(self) -> int:
        """The second number of the compute capability."""
        return _model().capability[1]

    @property
    def multi_processor_count(self) -> int:
        """How many multiprocessors the device has."""
        return _model().num_multiprocessors

    @property
    def max_threads_per_multi_processor(self) -> int:
        """How many threads a multiprocessor holds."""
        return _model().threads_per_multiprocessor

    @property
    def total_memory(self) -> int:
        """The capacity, in bytes."""
        return int(self._core.capacity_bytes())

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name={self.name!r}, major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory >> 20}MB)"
        )


_HOST_MEMORY_REGISTERED, _HOST_MEMORY_NOT_REGISTERED = 712, 713  # cudaError_t


class Cudart:
    """The answer of ``torch.cuda.cudart()``: the few calls of CUDA's runtime that torch binds."""

    class cudaError(int):  # noqa: N801 - torch's spelling
        """A return code; everything here succeeds."""

        success = 0

    class cudaOutputMode:  # noqa: N801 - torch's spelling
        """The formats of CUDA's old profiler."""

        KeyValuePair, CSV = 0, 1

    @staticmethod
    def cudaMemGetInfo(device: int = 0) -> tuple[int, int]:  # noqa: N802 - torch's spelling
        """Returns the free and the total bytes."""
        free, total = torch.accelerator.get_memory_info(device)
        return free, total

    @staticmethod
    def cudaGetErrorString(code: Any) -> str:  # noqa: N802 - torch's spelling
        """Returns CUDA's words for a code."""
        return "no error" if code == 0 else f"error {int(code)}"

    @staticmethod
    def cudaThreadExchangeStreamCaptureMode(mode: Any) -> int:  # noqa: N802 - CUDA's spelling
        """Swaps the calling thread's mode with the one that ``mode``, of ctypes, refers to."""
        mode._obj.value = Cudart._exchange_capture_mode(mode._obj.value)
        return 0

    _exchange_capture_mode: Any = None  # set by `install`

    @staticmethod
    def _succeed(*arguments: object) -> int:
        return 0

    _core: Any = None  # set by `install`

    @classmethod
    def cudaHostRegister(cls, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        """Page-locks memory of the caller's; answers an error where some of it is."""
        return 0 if cls._core.register_host(address, num_bytes) else _HOST_MEMORY_REGISTERED

    @classmethod
    def cudaHostUnregister(cls, address: int) -> int:  # noqa: N802 - torch's spelling
        """Unlocks memory. A queued copy that still needs it is an error; CUDA may corrupt it."""
        return 0 if cls._core.unregister_host(address) else _HOST_MEMORY_NOT_REGISTERED

    cudaProfilerStart = cudaProfilerStop = cudaProfilerInitialize = _succeed  # noqa: N815
    cudaStreamCreate = cudaStreamDestroy = _succeed  # noqa: N815


class Nvtx:
    """The module behind ``torch.cuda.nvtx``: there is no profiler to mark ranges for."""

    _depth = 0

    def rangePushA(self, message: str) -> int:  # noqa: N802 - torch's spelling
        """Opens a range and returns how many were open."""
        self._depth += 1
        return self._depth - 1

    def rangePop(self) -> int:  # noqa: N802 - torch's spelling
        """Closes a range and returns how many are open."""
        self._depth -= 1
        return self._depth

    def rangeStartA(self, message: str) -> int:  # noqa: N802 - torch's spelling
        """Opens a range that is closed by its number."""
        return 0

    def rangeEnd(self, number: int) -> None:  # noqa: N802 - torch's spelling
        """Closes a range by its number."""

    def markA(self, message: str) -> None:  # noqa: N802 - torch's spelling
        """Marks a point in time."""


def install(core: Any, model: Callable[[], Gpu]) -> None:
    """Puts the classes where torch looks for them.

    Args:
        core: The compiled module.
        model: Says which GPU the device stands for.
    """
    CudaDeviceProperties._core = core
    CudaDeviceProperties._model = staticmethod(model)
    CudaEventBase._elapsed = staticmethod(core.elapsed_milliseconds)
    Cudart._exchange_capture_mode = staticmethod(core.exchange_capture_mode)
    Cudart._core = core
    torch._C.__dict__.update(_CudaStreamBase=CudaStreamBase, _CudaEventBase=CudaEventBase)
    streams = importlib.reload(torch.cuda.streams)  # its classes, over these bases
    torch.cuda.__dict__.update(
        Stream=streams.Stream,
        Event=streams.Event,
        ExternalStream=streams.ExternalStream,
        _CudaDeviceProperties=CudaDeviceProperties,
        _cudart=Cudart(),
    )
    torch.cuda.nvtx.__dict__["_nvtx"] = Nvtx()
