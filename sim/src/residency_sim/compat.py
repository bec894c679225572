"""The simulated accelerator for other packages: changes of those that know devices by name."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

__all__ = ["teach_packages", "teach_safetensors", "teach_transformers"]


def teach_packages() -> None:
    """Tells the packages that keep lists of devices; those that are not installed need no word."""
    teach_safetensors()
    teach_transformers()


def teach_safetensors() -> None:
    """Lets ``safetensors`` load to the device.

    Its native part keeps a list of device names of its own and refuses others, so files are opened
    on the host and each tensor is moved as it is read. Does nothing where safetensors is not
    installed.
    """
    if importlib.util.find_spec("safetensors") is None:
        return
    import safetensors
    import safetensors.torch

    native: Any = safetensors.safe_open
    if getattr(native, "knows_sim", False):
        return

    class safe_open:  # noqa: N801 - stands in for the function of that name
        """A file opened as by ``safetensors.safe_open``, for devices that it does not know, too."""

        knows_sim = True

        def __init__(self, filename: Any, framework: str, device: Any = "cpu", **options: Any):
            self._device = device if str(device).startswith("sim") else None
            host = "cpu" if self._device is not None else device
            self._file: Any = native(filename, framework=framework, device=host, **options)

        def __enter__(self) -> Any:
            self._file.__enter__()
            return self

        def __exit__(self, *error: Any) -> Any:
            return self._file.__exit__(*error)

        def get_tensor(self, name: str) -> Any:
            """Returns one tensor, on the device that the file was opened for."""
            tensor = self._file.get_tensor(name)
            return tensor if self._device is None else tensor.to(self._device)

        def get_tensors(self, *args: Any) -> Any:
            """Returns several tensors by name, on the device that the file was opened for."""
            tensors = self._file.get_tensors(*args)
            if self._device is None:
                return tensors
            return {name: tensor.to(self._device) for name, tensor in tensors.items()}

        def __getattr__(self, name: str) -> object:
            return getattr(self._file, name)

    _replace_everywhere("safe_open", native, safe_open)


def teach_transformers() -> None:
    """Lets ``transformers`` know that the device has bfloat16 (``TrainingArguments(bf16=True)``).

    It asks a list of device names of its own. Does not import transformers: where that has not
    happened yet, the call is made as soon as it has.
    """
    name = "transformers.utils.import_utils"
    if name in sys.modules:
        _tell_of_bf16(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, _tell_of_bf16))


def _tell_of_bf16(module: ModuleType) -> None:
    def is_available() -> bool:
        return True

    name = "is_torch_bf16_gpu_available"
    _replace_everywhere(name, vars(module)[name], is_available)


def _replace_everywhere(name: str, old: object, new: object) -> None:
    """Replaces a global in all modules that have it under its own name."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if names.get(name) is old:
            names[name] = new


class _AfterImport(importlib.abc.MetaPathFinder):
    """A finder that calls a function with a module right after its first import."""

    def __init__(self, name: str, tell: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._tell = tell

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Finds the module as Python does, once, with a loader that calls the function."""
        if name != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        sys.meta_path.remove(self)
        execute = spec.loader.exec_module

        def execute_and_tell(module: ModuleType) -> None:
            execute(module)
            self._tell(module)

        vars(spec.loader)["exec_module"] = execute_and_tell
        return spec
