"""Registers the built extension with torch as the device ``sim``, with a module ``torch.sim``, or
in CUDA's place (the faces of the simulator).

Torch finds a device's Python side under its name (``torch.sim``, as ``torch.cuda``); what is there
is what torch itself and the frameworks ask of such a module, and delegates to
``torch.accelerator``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch.utils import backend_registration

from residency._errors import InvalidArgumentError, RaceError, SimulatorError
from residency_sim import _allocator, _compile, _distributed, _meta_kernels, compat
from residency_sim._build import load_extension
from residency_sim._clock import Clock
from residency_sim._cuda import _face
from residency_sim._gpus import UNNAMED, gpu_named
from residency_sim._share import share_folder

_NAME = "sim"
FACES = (_NAME, _face.NAME)
_state: dict[str, Any] = {"loaded": None, "core": None, "settings": {}, "face": None}


def is_registered() -> bool:
    """Returns whether the device exists in this process."""
    return _state["core"] is not None


def face() -> str | None:
    """Returns the name of the device in this process, None before there is one."""
    name: str | None = _state["face"]
    return name


def is_dry() -> bool:
    """Returns whether the device runs kernels for their shapes only."""
    return bool(_state["settings"].get("dry"))


def has_compiled() -> bool:
    """Returns whether ``torch.compile`` was given a function, which then ran eagerly."""
    return bool(_state.get("compiled"))


def share() -> str | None:
    """Returns the name that the capacity is shared under, None where it is this process's own."""
    name: str | None = _state["settings"].get("share")
    return name


def settings() -> dict[str, Any]:
    """Returns the settings that were applied last, as arguments of ``residency.sim.enable``."""
    return {**_state["settings"], "devices": core().num_devices()}


def core() -> Any:
    """Returns the compiled module."""
    if _state["core"] is None:
        raise SimulatorError(
            "The simulated accelerator is not enabled; call residency.sim.enable() first."
        )
    return _state["core"]


def load(device: str) -> None:
    """Builds the extension if need be and loads it, so that settings can be tried.

    Raises:
        BuildError: It cannot be built here.
        InvalidArgumentError: ``PYTORCH_ALLOC_CONF`` has a setting that means nothing.
        SimulatorError: Torch has another device in its place already.
    """
    if device == _face.NAME:
        _face.check_free()
    else:
        _check_room()
    if _state["loaded"] is None:
        extension = load_extension()
        extension.choose_face(device)
        _allocator.adopt_settings(extension)
        _state.update(loaded=extension, face=device)


def _check_room() -> None:
    # torch keeps the name that was given, and shows it in no other way (2.13).
    taken = torch._C._get_privateuse1_backend_name()
    if taken not in ("privateuseone", _NAME):
        raise SimulatorError(
            f"The device {taken!r} is registered in this process, and torch has room for one such "
            "device; enable the simulated accelerator in a process of its own."
        )


def register(devices: int) -> None:
    """Registers the loaded extension with torch as the device; once a process.

    Args:
        devices: How many of it there are.
    """
    extension = _state["loaded"]
    extension.set_num_devices(devices)
    is_cuda = _state["face"] == _face.NAME
    if not is_cuda:
        backend_registration.rename_privateuse1_backend(_NAME)
    extension.register(str(Path(torch.__file__).parent), RaceError)
    _state["core"] = extension
    if is_cuda:
        _face.register(extension, lambda: DeviceProperties.model, is_dry)
    else:
        _register_sim(extension)
        compat.teach_packages()
    _state["compiled"] = _compile.run_compiled_eagerly(_state["face"])
    if torch.distributed.is_available():
        _distributed.let_data_parallel_run_dry(is_dry)


def _register_sim(extension: Any) -> None:
    module = _make_module()
    register_module: Any = torch._register_device_module  # torch does not annotate it
    register_module(_NAME, module)
    sys.modules[f"torch.{_NAME}"] = module
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    if torch.distributed.is_available():
        _distributed.register(extension)


def check_process() -> None:
    """Checks that this process may use the device.

    Raises:
        SimulatorError: It was forked from one that had used the device.
    """
    if not core().is_in_bad_fork():
        return
    try:
        core().use_device()
    except RuntimeError as error:
        raise SimulatorError(str(error)) from None


def configure(
    capacity_bytes: int,
    *,
    schedule: str,
    check_races: bool,
    dry: bool,
    clock: Clock | None,
    share: str | None,
    workspaces: bool,
    context_bytes: int,
    gpu: str | None,
) -> None:
    """Applies settings, after all queued work has run; changes nothing when it raises.

    Raises:
        InvalidArgumentError: The processes of the same share name do not agree to the capacity.
        SimulatorError: The file that they share cannot be used.
    """
    extension = _state["loaded"]
    rates = None if clock is None else clock.rates()
    if dry:
        _meta_kernels.prefer_compiled()
    folder = "" if share is None else share_folder()
    model = UNNAMED if gpu is None else gpu_named(gpu)[1]
    blas = _allocator.blas_workspace_bytes(extension, model.capability[0]) if workspaces else 0
    sharing = (folder, share or "")
    try:
        extension.configure(
            capacity_bytes,
            schedule,
            check_races,
            dry,
            rates,
            *sharing,
            workspaces,
            blas,
            context_bytes,
            model.capability[0] * 10 + model.capability[1],
            model.num_multiprocessors,
            model.threads_per_multiprocessor,
        )
    except extension.ShareRefused as error:
        raise InvalidArgumentError(str(error)) from None
    except extension.ShareUnusable as error:
        raise SimulatorError(str(error)) from None
    options = {"schedule": schedule, "check_races": check_races, "dry": dry, "clock": clock}
    options |= {"share": share, "workspaces": workspaces, "context": context_bytes, "gpu": gpu}
    DeviceProperties.model = model
    _state["settings"] = {"capacity": capacity_bytes, **options}


# ---------------------------------------------------------------------------------- torch.sim


class Stream(torch.Stream):
    """A stream of the simulated accelerator."""

    def __new__(cls, device: Any = None, priority: int = 0, **existing: Any) -> Stream:
        """Makes a stream, or wraps the one that ``stream_id`` and its fellows name."""
        if existing:
            return super().__new__(cls, **existing)
        return super().__new__(cls, device=torch.device(_NAME, 0), priority=priority)


class Event(torch.Event):
    """An event of the simulated accelerator."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> Event:
        """Makes an event that is not recorded yet."""
        return super().__new__(cls, _NAME, enable_timing=enable_timing)


class StreamContext:
    """A block in which a stream is current; None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self._stream = stream
        self._previous: torch.Stream | None = None

    def __enter__(self) -> torch.Stream | None:
        if self._stream is not None:
            self._previous = torch.accelerator.current_stream()
            torch.accelerator.set_stream(self._stream)
        return self._stream

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._previous is not None:
            torch.accelerator.set_stream(self._previous)


class DeviceContext:
    """A block in which a device is current: there is one, so only its index is checked."""

    def __init__(self, device: Any = None) -> None:
        if device is not None:
            _check_device(device)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


class DeviceProperties:
    """The answer of ``torch.sim.get_device_properties``: the figures of the GPU that is named, or
    an A100's, the scratch memory of whose kernels is modelled (``workspaces.h``).
    """

    model = UNNAMED
    name = "Simulated accelerator"

    @property
    def major(self) -> int:
        """The first number of the compute capability."""
        return self.model.capability[0]

    @property
    def minor(self) -> int:
        """The second number of the compute capability."""
        return self.model.capability[1]

    @property
    def multi_processor_count(self) -> int:
        """How many multiprocessors the GPU has."""
        return self.model.num_multiprocessors

    @property
    def total_memory(self) -> int:
        """The capacity, in bytes."""
        return int(core().capacity_bytes())


class GradScaler(torch.amp.GradScaler):
    """The ``torch.amp.GradScaler`` of this device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(_NAME, *args, **kwargs)


def _check_device(device: Any) -> None:
    index = device if isinstance(device, int) else torch.device(device).index
    if index not in (None, 0):
        raise SimulatorError(
            f"There is one simulated accelerator, so use sim:0; found index {index}."
        )


def _make_module() -> ModuleType:
    module = ModuleType(f"torch.{_NAME}", "The simulated accelerator.")
    for part in (_device_functions(), _stream_functions(), _memory_functions(), _rng_functions()):
        vars(module).update(part)
    amp = ModuleType(f"torch.{_NAME}.amp", "Mixed precision on the simulated accelerator.")
    vars(amp).update(GradScaler=GradScaler)
    sys.modules[f"torch.{_NAME}.amp"] = amp
    vars(module).update(
        amp=amp,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        is_bf16_supported=lambda including_emulation=True: True,
    )
    return module


def _device_functions() -> dict[str, object]:
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: not core().is_in_bad_fork(),
        "init": core().use_device,
        "_lazy_init": core().use_device,
        "_is_in_bad_fork": core().is_in_bad_fork,
        "_initialized": True,  # else torch's checkpointing leaves out the device's random state
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": _check_device,
        # The caller waits for all that it has queued: it asked for that.
        "synchronize": lambda device=None: torch.accelerator.synchronize(),
        "get_device_name": lambda device=None: DeviceProperties.name,
        "get_device_capability": lambda device=None: DeviceProperties.model.capability,
        "get_device_properties": lambda device=None: DeviceProperties(),
        "device": DeviceContext,
        "device_of": lambda tensor: DeviceContext(),
    }


def _stream_functions() -> dict[str, object]:
    default = {"stream_id": 0, "device_index": 0, "device_type": 20}  # 20: PrivateUse1
    return {
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: torch.accelerator.current_stream(),
        "default_stream": lambda device=None: torch.Stream(**default),
        "set_stream": torch.accelerator.set_stream,
        "stream": StreamContext,
    }


def _memory_functions() -> dict[str, object]:
    accelerator = torch.accelerator
    figures = (
        "max_memory_allocated",
        "max_memory_reserved",
        "memory_allocated",
        "memory_reserved",
        "reset_accumulated_memory_stats",
        "reset_peak_memory_stats",
    )

    def of_the_device(function: Any) -> Any:
        return lambda device=None: function(device)  # refused by torch where there is none

    functions: dict[str, object] = {
        name: of_the_device(getattr(accelerator, name)) for name in figures
    }
    functions["empty_cache"] = accelerator.empty_cache
    functions["mem_get_info"] = of_the_device(accelerator.get_memory_info)
    functions["ipc_collect"] = lambda: None
    functions["memory_stats"] = _allocator.memory_stats(core())
    return functions | _allocator.functions(core())


def _rng_functions() -> dict[str, object]:
    generator = core().default_generator()

    def manual_seed(seed: int) -> None:
        generator.manual_seed(int(seed))

    def set_rng_state(state: torch.Tensor, device: object = None) -> None:
        generator.set_state(state)

    return {
        "default_generators": (generator,),
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed,
        "initial_seed": generator.initial_seed,
        "seed": generator.seed,
        "seed_all": generator.seed,
        "get_rng_state": lambda device=None: generator.get_state(),
        "set_rng_state": set_rng_state,
        "get_rng_state_all": lambda: [generator.get_state()],
        "set_rng_state_all": lambda states: set_rng_state(states[0]),
    }
