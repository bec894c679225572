"""Turns the JSON nodes of a document back into Python values.

The counterpart of ``_encode``; the objects that ``_tree`` describes come back as their state dicts.
"""

from __future__ import annotations

import base64
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from residency._errors import CorruptSaveError

_CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {
    "size": torch.Size,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
}


def decode(node: Any, tensor_of: Callable[[str], Tensor]) -> Any:
    """Returns the value of a node.

    Args:
        node: What ``json.loads`` returned.
        tensor_of: Returns the tensor of a name.

    Raises:
        CorruptSaveError: The node is of no kind that a save has.
    """
    if isinstance(node, list):
        return [decode(each, tensor_of) for each in node]
    if not isinstance(node, dict):
        return node
    if "$" not in node:
        return {key: decode(each, tensor_of) for key, each in node.items()}
    try:
        return _special(node["$"], node, tensor_of)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise CorruptSaveError(
            f"the save's document has a node of kind {node.get('$')!r} that does not make sense "
            f"({type(error).__name__}: {error}); it was not written by this version of residency."
        ) from error


def _special(kind: str, node: dict[str, Any], tensor_of: Callable[[str], Tensor]) -> Any:
    if kind == "tensor":
        return tensor_of(node["name"])
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](decode(node["items"], tensor_of))
    if kind in ("dict", "ordered"):
        pairs = [(decode(k, tensor_of), decode(v, tensor_of)) for k, v in node["items"]]
        return dict(pairs) if kind == "dict" else OrderedDict(pairs)
    if kind == "float":
        return float(node["value"])
    if kind == "complex":
        return complex(*(decode(part, tensor_of) for part in node["value"]))
    if kind in ("bytes", "bytearray"):
        make = bytes if kind == "bytes" else bytearray
        if "tensor" in node:
            return make(bytes(tensor_of(node["tensor"]).tolist()))
        return make(base64.b64decode(node["value"]))
    if kind == "dtype":
        return getattr(torch, node["value"])
    if kind == "device":
        return torch.device(node["value"])
    if kind == "ndarray":
        return _array(node, tensor_of(node["tensor"]))
    if kind == "module":
        values = {name: tensor_of(name) for name in node["names"]}
        return OrderedDict(
            [(key, values[name]) for key, name in zip(node["keys"], node["names"], strict=True)]
            + [(key, decode(each, tensor_of)) for key, each in node["extra"].items()]
        )
    if kind == "optimizer":
        return optimizer_state_dict(node, tensor_of)
    if kind == "scaler":
        return _scaler_state_dict(node, tensor_of)
    if kind == "stateful":
        return decode(node["state"], tensor_of)
    raise ValueError(f"unknown kind {kind!r}")


def optimizer_state_dict(node: dict[str, Any], tensor_of: Callable[[str], Tensor]) -> Any:
    """Returns the state dict that torch's ``Optimizer`` would give, its parameters numbered."""
    numbers: dict[str, int] = {}
    groups = []
    for names, hyper in zip(node["parameters"], node["groups"], strict=True):
        params = [numbers.setdefault(name, len(numbers)) for name in names]
        groups.append({**decode(hyper, tensor_of), "params": params})
    state: dict[Any, Any] = {
        numbers[name]: decode(values, tensor_of) for name, values in node["state"].items()
    }
    state.update(decode(node["loose"], tensor_of))
    return {"state": state, "param_groups": groups, **decode(node["others"], tensor_of)}


def _scaler_state_dict(node: dict[str, Any], tensor_of: Callable[[str], Tensor]) -> dict[str, Any]:
    if not node["enabled"]:
        return {}
    scale, tracker = (decode(node[key], tensor_of) for key in ("scale", "growth_tracker"))
    return {
        "scale": scale.item() if isinstance(scale, Tensor) else scale,
        "growth_factor": node["growth_factor"],
        "backoff_factor": node["backoff_factor"],
        "growth_interval": node["growth_interval"],
        "_growth_tracker": tracker.item() if isinstance(tracker, Tensor) else tracker,
    }


def _array(node: dict[str, Any], data: Tensor) -> Any:
    import numpy

    flat = data.numpy().view(numpy.dtype(node["dtype"])).reshape(node["shape"]).copy()
    return flat[()] if node["is_scalar"] else flat
