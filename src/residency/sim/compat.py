"""What other packages must be told about the simulated accelerator."""

from __future__ import annotations

import importlib.util
from typing import Any


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
        """Opens a file as ``safetensors.safe_open`` does, for devices that it does not know too."""

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

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    for module in (safetensors, safetensors.torch):
        vars(module)["safe_open"] = safe_open
