"""Which accelerator there is, and what it can be asked.

The only file (the simulator aside) that names ``torch.cuda`` or asks torch which accelerator is
present. Everything here answers on a machine without an accelerator too: there is no device,
nothing is pinned, and every memory figure is zero.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from residency._errors import InvalidArgumentError, RefusedError
from residency._modes import callers_modes_off


def accelerator() -> torch.device | None:
    """Returns the current accelerator with its index, or None where there is none.

    Asking starts nothing: a process that has not used the device is left without a context on it
    and able to fork. Before torch initialises a device, its first one is every thread's; torch
    would initialise it to say so, and its `is_available` starts CUDA's driver.
    """
    found = torch.accelerator.current_accelerator()
    if found is None:
        return None
    if _is_initialized(found):
        return torch.device(found.type, torch.accelerator.current_device_index())
    return torch.device(found.type, 0) if torch.accelerator.device_count() else None


def _is_initialized(device: torch.device) -> bool:
    """Returns whether torch has initialised the device; True of a device that cannot say."""
    ask = getattr(torch.get_device_module(device), "is_initialized", None)
    return ask is None or bool(ask())


def has_context(device: torch.device) -> bool:
    """Returns whether this process has a context on the device: whether it has used it by now.

    Without one it has no memory there, and nothing page-locked for it; to ask how much is free, to
    synchronise or to pin would make one, of 0.5 GB on CUDA, in a process that may need none.
    """
    if not _is_initialized(device):
        return False
    # No public function of torch asks the driver without making what it asks for.
    ask: Any = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return device.type != "cuda" or ask is None or bool(ask(device.index))


def used_accelerators() -> list[torch.device]:
    """Returns every accelerator on which this process has a context, whichever is current."""
    found = accelerator()
    if found is None:
        return []
    present = [torch.device(found.type, i) for i in range(torch.accelerator.device_count())]
    return [device for device in present if has_context(device)]


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a device the calling thread's current one within a ``with``.

    Code that records an event, or waits for one, on another device than the thread's goes through
    this. Torch's events and synchronisations set the device and then the thread's own again, which
    on CUDA makes a context on that one, of 0.5 GB (``SetDevice`` in c10/cuda/CUDAFunctions.cpp).
    The end of this ``with`` makes none.
    """
    if device.index is None or device.index == torch.accelerator.current_device_index():
        return nullcontext()
    return torch.accelerator.device_index(device.index)


def wait_event(stream: torch.Stream, event: torch.Event) -> None:
    """Makes a stream wait for an event before it runs any work that is queued from now on."""
    with on(stream.device):
        stream.wait_event(event)  # whose bytes they are, the caller says


def current_index() -> int | None:
    """Returns the index of the calling thread's device, or None where there is none."""
    found = accelerator()
    return None if found is None else found.index


def use_index(index: int | None) -> None:
    """Makes a device the calling thread's, which torch starts on the first one; None is nothing."""
    if index is not None and index != current_index():
        torch.accelerator.set_device_index(index)


def current_stream(device: torch.device) -> torch.Stream:
    """Returns the stream on which the calling thread's work for ``device`` runs."""
    return torch.accelerator.current_stream(device)


def new_stream(device: torch.device) -> torch.Stream:
    """Makes a stream; make few and keep them, each has an allocator pool of its own."""
    return torch.Stream(device=device)


def refuse_shared_memory(device: torch.device, what: str) -> None:
    """Refuses what would free nothing on a device that has no memory of its own.

    Args:
        device: The accelerator.
        what: What the caller asks for, as a subject: ``"an offload of this AdamW"``.

    Raises:
        RefusedError: The device shares the host's memory, and ``RESIDENCY_ON_SHARED_MEMORY`` does
            not ask for it all the same.
    """
    if shares_host_memory(device) and os.environ.get("RESIDENCY_ON_SHARED_MEMORY") != "1":
        raise RefusedError(
            f"{device} shares the host's memory, so that {what} would free nothing and cost its "
            "copies. Nothing was changed; leave it out, or set RESIDENCY_ON_SHARED_MEMORY=1."
        )


def shares_host_memory(device: torch.device) -> bool:
    """Returns whether a device has no memory of its own, as those of one chip with the processor.

    CUDA calls those integrated (Jetson, GB10), and Apple's are all so. A GH200 is not: its device
    has memory of its own, and a fast link to the host's.
    """
    if device.type == "cuda":
        return bool(getattr(torch.cuda.get_device_properties(device), "is_integrated", False))
    return device.type == "mps"


def is_pinning_available() -> bool:
    """Returns whether host memory can be page-locked for an accelerator here."""
    return accelerator() is not None


def unfilled_bytes(num_bytes: int, device: torch.device, *, pin: bool = False) -> Tensor:
    """Allocates bytes without filling them, for copies that write all of them.

    ``torch.empty`` fills what it returns where a caller wants deterministic algorithms
    (``torch.utils.deterministic.fill_uninitialized_memory``), seconds for gigabytes on the host.
    That is one setting of all threads, so it is left alone; a storage that grows is not filled.

    Returns:
        ``uint8`` of shape ``[num_bytes]``, in a storage of its own.
    """
    data = torch.empty(0, dtype=torch.uint8, device=device, pin_memory=pin)
    storage = data.untyped_storage()
    storage.resize_(num_bytes)
    return data.set_(storage, 0, (num_bytes,), (1,))


def is_lost(error: BaseException) -> bool:
    """Returns whether an error is the device's own, and not of memory that could not be had.

    After one, as of an index out of bounds, CUDA answers every call with it until the process ends.
    """
    out_of_memory = 2  # cudaErrorMemoryAllocation
    code = getattr(error, "error_code", None)
    return isinstance(error, torch.AcceleratorError) and code != out_of_memory


def memory_allocated(device: torch.device | None = None) -> int:
    """Returns the bytes that live tensors hold on the device."""
    return torch.accelerator.memory_allocated(device) if accelerator() is not None else 0


def max_memory_allocated(device: torch.device | None = None) -> int:
    """Returns the most bytes that live tensors have held since the last reset."""
    return torch.accelerator.max_memory_allocated(device) if accelerator() is not None else 0


def is_simulated() -> bool:
    """Returns whether the accelerator is the simulated one, whose clock is one, too."""
    # Not its door, which a program may have imported where the simulator itself cannot be.
    module: Any = sys.modules.get("residency_sim._enable")
    return module is not None and bool(module.is_enabled())


def is_dry() -> bool:
    """Returns whether kernels and copies run for their shapes only, so that host memory which is
    asked for need not be there.
    """
    return is_simulated() and bool(sys.modules["residency_sim._enable"].settings()["dry"])


def reset_peak(device: torch.device | None = None) -> None:
    """Starts the peak of ``max_memory_allocated`` anew; torch has one register for all callers."""
    if accelerator() is not None:
        torch.accelerator.reset_peak_memory_stats(device)


def memory_info(device: torch.device | None = None) -> tuple[int, int]:
    """Returns the free and the total bytes of the device, as the device itself counts them."""
    if accelerator() is None:
        return 0, 0
    free, total = torch.accelerator.get_memory_info(device)
    return free, total


def synchronize(device: torch.device | None = None) -> None:
    """Blocks the host until everything has run that is queued on the device, by default on every
    one.
    """
    for each in used_accelerators() if device is None else [device]:
        if has_context(each):
            with on(each):
                torch.accelerator.synchronize(each)  # what this function is for


def finish_backward(device: torch.device) -> None:
    """Waits until autograd's thread for the device has let go of the last backward pass.

    The thread still holds tensors of it when ``backward`` returns (measured on the simulator: 5 in
    100 readings of the memory right after it). A pass over no bytes gets its turn in that thread
    when the last one is gone, and leaves nothing to hold.
    """
    with callers_modes_off(), torch.enable_grad():
        nothing = torch.empty(0, dtype=torch.float32, device=device, requires_grad=True)
        with suppress(RuntimeError):  # the device is lost, and so are the passes
            torch.autograd.backward([nothing * 1], [nothing.detach()])


def rng_state(device: torch.device) -> Tensor | None:
    """Returns the state of the device's generator, bytes on the host; waits for nothing.

    None where torch has not initialised the device: nothing has been drawn there, and to ask would
    initialise it.
    """
    if not _is_initialized(device):
        return None
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_rng_state(state: Tensor, device: torch.device) -> None:
    """Puts the device's generator into a state that ``rng_state`` returned.

    CUDA takes it when it is initialised.
    """
    torch.get_device_module(device).set_rng_state(state, device)


def limit_memory(num_bytes: int, device: torch.device) -> bool:
    """Makes torch's allocator on a CUDA device refuse to hold more than ``num_bytes``.

    Returns:
        Whether a limit was set: only CUDA's allocator has one.
    """
    if device.type != "cuda":
        return False
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total), device)
    return True


# ---------------------------------------------------------------------------------- memory figures


def resolve(device: torch.device | int | str | None) -> torch.device | None:
    """Returns the accelerator that is meant, with its index; None where none is named nor there.

    Raises:
        InvalidArgumentError: What is named is no accelerator of this machine.
    """
    present = accelerator()
    if device is None:
        return present
    try:
        named = torch.device(device)
    except (RuntimeError, TypeError) as error:
        first_line = str(error).partition("\n")[0]
        raise InvalidArgumentError(f"device is {device!r}: {first_line}") from None
    if present is None or named.type != present.type:
        there = "there is none" if present is None else f"this machine's is {present.type!r}"
        raise InvalidArgumentError(f"device is {str(named)!r}; expected an accelerator: {there}.")
    index = present.index if named.index is None else named.index
    if index >= (count := torch.accelerator.device_count()):
        raise InvalidArgumentError(
            f"device is {str(named)!r}; this machine has {count}: expected an index below."
        )
    return torch.device(present.type, index)


def allocator_figures(device: torch.device) -> Mapping[str, Any]:
    """Returns the allocator's figures under torch's names; none before the device is used.

    Asking starts nothing: a process that has not touched the device is left able to fork.
    """
    if not has_context(device):
        return {}
    # The device's own names private pools, which `torch.accelerator` leaves out.
    read: Any = getattr(torch.get_device_module(device), "memory_stats", None)
    figures: Mapping[str, Any] = (read or torch.accelerator.memory_stats)(device)
    return figures


def memory_segments(device: torch.device) -> list[dict[str, Any]] | None:
    """Returns the allocator's segments on a device with their blocks; None where it shows none.

    On CUDA it takes milliseconds for thousands of blocks.
    """
    snapshot: Any = getattr(torch.get_device_module(device), "memory_snapshot", None)
    if snapshot is None:
        return None
    try:
        segments = snapshot(include_traces=False)
    except torch.AcceleratorError:
        raise
    except RuntimeError:  # of an allocator that keeps no list, as CUDA's asynchronous one
        return None
    return [segment for segment in segments if segment["device"] == device.index]


def device_room(device: torch.device) -> tuple[int, int] | None:
    """Returns the device's free and total bytes; None where its backend does not tell them.

    Raises:
        torch.AcceleratorError: The device is lost.
    """
    try:
        return torch.accelerator.get_memory_info(device)
    except torch.AcceleratorError:
        raise
    except RuntimeError:  # of a backend without these figures; NotImplementedError is one, too
        return None


def tells_settings() -> bool:
    """Returns whether torch tells its allocator's settings as they are now; 2.11 does not."""
    # torch has public names for neither reading nor writing them.
    return hasattr(torch._C, "_accelerator_getAllocatorSettings")


def allocator_settings() -> str:
    """Returns the allocator's settings as torch last took them; where it does not tell, those that
    the process began with.
    """
    # see `tells_settings`
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if read is not None:
        return str(read() or "")
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    return next(filter(None, map(os.environ.get, names)), "")  # torch 2.11 tells nothing


def set_allocator_settings(settings: str) -> None:
    """Gives the allocator new settings; what has been allocated stays as it is.

    Raises:
        RefusedError: This torch, or the allocator, does not take them.
    """
    # see `tells_settings`
    write = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if write is None:
        raise RefusedError("This build of torch cannot change the settings of its allocator.")
    try:
        write(settings)
    except (RuntimeError, ValueError) as error:
        first_line = str(error).partition("\n")[0]
        message = f"The allocator refuses the settings {settings!r}: {first_line}"
        raise RefusedError(message) from None


def empty_cache(device: torch.device) -> None:
    """Gives the allocator's whole free segments back to the device; waits for draining blocks.

    Torch empties the caches of all devices of the process. With another device current, or with
    work under way on one of several, segments that grow were unmapped in use (pytorch#196258).
    """
    used = [
        index
        for index in range(torch.accelerator.device_count())
        if torch.accelerator.memory_reserved(index)
    ]
    for index in used if len(used) > 1 else []:
        torch.accelerator.synchronize(index)  # see above: work under way
    with torch.accelerator.device_index(device.index):
        torch.accelerator.empty_cache()


def is_capturing(device: torch.device) -> bool:
    """Returns whether the current stream is being captured into a graph."""
    return device.type == "cuda" and bool(torch.cuda.is_current_stream_capturing())


def tolerate_captures() -> None:
    """Lets the calling thread wait and page-lock while another one captures a CUDA graph.

    Such calls end a capture with an error, those of any thread in CUDA's default mode, unless the
    thread's own mode is relaxed (CUDA's runtime API, ``cudaThreadExchangeStreamCaptureMode``). For
    threads of the library's own; does nothing where CUDA is not in use, and never fails.
    """
    in_use: Any = torch.cuda.is_initialized
    if in_use() and (exchange := _of_runtime("cudaThreadExchangeStreamCaptureMode")) is not None:
        exchange(ctypes.byref(ctypes.c_int(_RELAXED)))


def _of_runtime(name: str) -> Any:
    """Returns a function of CUDA's runtime that torch has loaded; None where it is not found."""
    cudart: Any = torch.cuda.cudart  # binds a few functions; the simulator's those used here, too
    if (found := getattr(cudart(), name, None)) is not None:
        return found
    major = str(torch.version.cuda).partition(".")[0]
    try:
        loaded = ctypes.CDLL(f"libcudart.so.{major}", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        return getattr(loaded, name)
    except (OSError, AttributeError):
        return None


def register_host(address: int, num_bytes: int) -> bool:
    """Page-locks host memory of the caller's for CUDA; returns whether it is now."""
    # HIP's registration of such memory is another, of which nothing has been measured.
    if torch.version.hip is not None or (do := _of_runtime("cudaHostRegister")) is None:
        return False
    is_done = int(do(address, num_bytes, 0)) == 0
    if not is_done and (take := _of_runtime("cudaGetLastError")) is not None:
        take()  # or the next kernel would raise it
    return is_done


def unregister_host(address: int) -> None:
    """Takes ``register_host`` back, before the memory goes; no copy of it is under way."""
    if (do := _of_runtime("cudaHostUnregister")) is not None:
        do(address)


_RELAXED = 2  # cudaStreamCaptureModeRelaxed


def clear_workspaces(device: torch.device) -> None:
    """Frees the workspaces that matrix products keep from one to the next; the next makes its own.

    Must not be called while a captured graph is alive: a replay would write to what was freed.
    """
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if device.type != "cuda":  # the simulated accelerator's
        clear = getattr(torch.get_device_module(device), "clear_workspaces", None)
    if clear is not None:
        clear()


def charged_bytes(device: torch.device) -> int | None:
    """Returns the bytes that the driver charges this process with; None where it does not tell.

    Asks NVIDIA's management library, if its Python binding is installed. In a container it may
    know this process under another number, and then tells nothing.
    """
    if device.type != "cuda":
        return None
    try:
        import pynvml  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(
            f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        )
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except (pynvml.NVMLError, AttributeError):
        return None
    own = [process.usedGpuMemory for process in processes if process.pid == os.getpid()]
    return int(own[0]) if own and own[0] is not None else None


def tag_memory_history(device: torch.device, text: str) -> Any:
    """Attaches a text to the allocations that torch's own memory history records from here on.

    Returns:
        What was attached before, for `untag_memory_history`; None where there is no such thing.
    """
    # torch shows what is attached to recorded blocks in no other way.
    read = getattr(torch._C, "_cuda_getMemoryMetadata", None)
    if device.type != "cuda" or read is None or not _is_initialized(device):
        return None  # the texts are the allocator's, which torch makes when it initialises CUDA
    before = read()
    tag: object = {**before, "phase": text} if isinstance(before, dict) else text  # 2.15: a mapping
    untag_memory_history(tag)
    return before


def untag_memory_history(before: object) -> None:
    """Puts back what `tag_memory_history` found; None for nothing."""
    # see `tag_memory_history`
    write = getattr(torch._C, "_cuda_setMemoryMetadata", None)
    if before is not None and write is not None:
        write(before)
