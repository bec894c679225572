"""What an optimizer's groups must be like to be offloaded, asked before anything moves.

The offload, a group that is added later and a model that was moved ask the same questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from residency import _device
from residency._dtensor import is_sharded, local_of
from residency._errors import InvalidArgumentError, RefusedError
from residency._transfer import is_away, refuse_hidden_state

_FLAGS = {
    "capturable": "a captured step replays fixed addresses, and streamed state has none",
    "differentiable": "a step inside the graph would keep every slot alive",
}


def check_optimizer(value: object, *, caller: str) -> None:
    """Checks that a function was given an optimizer.

    Args:
        value: What it was given.
        caller: The function's name, for the error.

    Raises:
        InvalidArgumentError: It is something else; the message says what to pass instead.
        RefusedError: It hides its state.
    """
    if isinstance(value, Optimizer):
        refuse_hidden_state(value, "give the parameters to one of torch.optim, and offload that")
        return
    got = f"a {type(value).__name__}"
    if type(value).__module__.partition(".")[0] == "deepspeed":
        remedy = (
            "DeepSpeed moves its state by itself, if zero_optimization.offload_optimizer in its "
            "configuration names a device"
        )
    elif isinstance(value, type):
        got, remedy = f"the class {value.__name__}", "make one of it"
    elif isinstance(value, torch.nn.Module):
        got += ", which is a torch.nn.Module"
        remedy = "pass the optimizer that steps it, such as torch.optim.AdamW(model.parameters())"
    elif isinstance(value, tuple | list):
        got += f" of {', '.join(type(each).__name__ for each in value) or 'nothing'}"
        remedy = _item_to_pass(value, caller)
    else:
        held = [n for n, each in _attributes(value).items() if isinstance(each, Optimizer)]
        remedy = f"pass its .{held[0]}" if held else "pass the one that does the steps"
    raise InvalidArgumentError(
        f"{caller} got {got}; expected a torch.optim.Optimizer. Nothing was changed: {remedy}."
    )


def _item_to_pass(values: Sequence[object], caller: str) -> str:
    found = [index for index, each in enumerate(values) if isinstance(each, Optimizer)]
    if len(found) == 1:
        return f"pass its item {found[0]}, the {type(values[found[0]]).__name__}"
    return f"call {caller} for each optimizer" + (" in it" if found else "")


def _attributes(value: object) -> dict[str, object]:
    return {n: v for n, v in getattr(value, "__dict__", {}).items() if not n.startswith("_")}


def check_groups(name: str, groups: Sequence[dict[str, Any]]) -> None:
    """Checks settings and parameters of groups.

    Args:
        name: The optimizer's class, for the error.
        groups: Each with its ``params`` as a list of tensors.

    Raises:
        RefusedError: A setting or a parameter is such as cannot be streamed.
    """
    check_flags(name, groups)
    for group in groups:
        parameters = group["params"]
        if len({id(p) for p in parameters}) != len(parameters):
            raise RefusedError(f"{name} has a group that lists a parameter twice. List it once.")
        for parameter in parameters:
            _check_parameter(name, parameter)


def check_flags(name: str, groups: Sequence[dict[str, Any]]) -> None:
    """Checks the settings of groups, which a load or a caller may change at any time.

    Raises:
        RefusedError: A setting is such as cannot be streamed.
    """
    for group in groups:
        for flag, reason in _FLAGS.items():
            if group.get(flag):
                raise RefusedError(
                    f"{name} has {flag}=True in a group: {reason}. Nothing was changed: use "
                    f"{flag}=False."
                )
        if name == "Adafactor":
            _check_epsilon(group)


def _check_epsilon(group: dict[str, Any]) -> None:
    """Refuses what torch's own loop hands on from one parameter of a group to the next.

    Source: ``_single_tensor_adafactor`` and ``_multi_tensor_adafactor`` of torch 2.13, which set
    ``eps1`` by the dtype of the first parameter and keep it for the others.
    """
    dtypes = {parameter.dtype for parameter in group["params"]}
    if group.get("eps", (0.0,))[0] is None and len(dtypes) > 1:
        raise RefusedError(
            f"Adafactor has a group with parameters of {sorted(map(str, dtypes))} and eps[0]=None, "
            "for which torch takes the precision of the first one: a part of a step would take "
            "another. Nothing was changed: give eps=(1e-30, 1e-3), or a group for each dtype."
        )


def _check_parameter(name: str, parameter: Tensor) -> None:
    is_shard = is_sharded(parameter)
    if not is_shard and type(parameter) not in (Tensor, torch.nn.Parameter):
        raise RefusedError(
            f"{name} has a parameter of type {type(parameter).__name__}; only torch.Tensor, "
            "torch.nn.Parameter and DTensor are supported."
        )
    bytes_of = type(local_of(parameter).data)
    if bytes_of is not Tensor:
        raise RefusedError(
            f"{name} has a parameter over a {bytes_of.__name__}; only plain tensors are supported."
        )
    if is_shard and name == "Adafactor":
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
        num_away = sum(map(is_away, parameters))
        raise RefusedError(
            f"{name} has parameters on {sorted(map(str, devices))}; expected them on one device."
            + f" {num_away} are parked: call residency.unpark first." * bool(num_away)
        )
    device: torch.device = devices.pop()
    accelerator = _device.accelerator()
    if device.type != "cpu" and (accelerator is None or accelerator.type != device.type):
        raise RefusedError(
            f"{name} has its parameters on {device}, which is no accelerator here; move the "
            "model to "
            "one before the optimizer is made."
        )
    return device


def has_no_rate(optimizer: Optimizer) -> bool:
    """Returns whether all learning rates are zero: how ``torch.distributed.checkpoint`` makes the
    state of a fresh optimizer before a load. Rates on the device are not looked at.
    """
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if rate is None or (isinstance(rate, Tensor) and not rate.is_cpu) or rate != 0:
            return False
    return True
