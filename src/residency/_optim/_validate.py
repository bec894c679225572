"""What an optimizer's groups must be like to be offloaded, asked before anything moves.

The offload, a group that is added later and a model that was moved ask the same questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from residency import _device
from residency._errors import RefusedError
from residency._transfer import is_sharded, local_of

_FLAGS = {
    "capturable": "a captured step replays fixed addresses, and streamed state has none",
    "differentiable": "a step inside the graph would keep every slot alive",
}


def check_groups(name: str, groups: Sequence[dict[str, Any]]) -> None:
    """Checks settings and parameters of groups.

    Args:
        name: The optimizer's class, for the error.
        groups: Each with its ``params`` as a list of tensors.

    Raises:
        RefusedError: A setting or a parameter is such as cannot be streamed.
    """
    for group in groups:
        for flag, reason in _FLAGS.items():
            if group.get(flag):
                raise RefusedError(f"{name} has {flag}=True: {reason}. Build it with {flag}=False.")
        parameters = group["params"]
        if len({id(p) for p in parameters}) != len(parameters):
            raise RefusedError(f"{name} has a group that lists a parameter twice. List it once.")
        for parameter in parameters:
            _check_parameter(name, parameter)


def _check_parameter(name: str, parameter: Tensor) -> None:
    if not is_sharded(parameter) and type(parameter) not in (Tensor, torch.nn.Parameter):
        raise RefusedError(
            f"{name} has a parameter of type {type(parameter).__name__}; only torch.Tensor, "
            "torch.nn.Parameter and DTensor are supported."
        )
    bytes_of = type(local_of(parameter).data if is_sharded(parameter) else parameter.data)
    if bytes_of is not Tensor:
        raise RefusedError(
            f"{name} has a parameter over a {bytes_of.__name__}; only plain tensors are supported."
        )
    if is_sharded(parameter) and name == "Adafactor":
        raise RefusedError(
            "Adafactor has DTensor parameters, which torch's own step cannot take (2.13: its norms "
            "are partial sums in place). Shard with another optimizer."
        )
    for what, tensor in (("parameter", parameter), ("gradient", parameter.grad)):
        if tensor is not None and tensor.layout is not torch.strided:
            raise RefusedError(
                f"{name} has a {what} of layout {tensor.layout} and shape {tuple(tensor.shape)}; "
                "only dense ones are supported."
            )


def device_of(name: str, parameters: Sequence[Tensor]) -> torch.device:
    """Returns the device that all parameters are on.

    Raises:
        RefusedError: There are several devices, or none, or it is no accelerator of this process.
    """
    if not parameters:
        raise RefusedError(f"{name} has no parameters; add a group with some first.")
    devices = {p.device for p in parameters}
    if len(devices) != 1:
        raise RefusedError(
            f"{name} has parameters on {sorted(map(str, devices))}; expected them on one device."
        )
    device: torch.device = devices.pop()
    accelerator = _device.accelerator()
    if device.type != "cpu" and (accelerator is None or accelerator.type != device.type):
        raise RefusedError(f"{name} has its parameters on {device}, which is no accelerator here.")
    return device
