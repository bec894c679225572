"""Makes of a document's nodes what a snapshot shows: objects as the state dicts that they gave."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import Tensor

from residency._checkpoint._decode import Fetch, decode, kind_of


def state_dicts(node: Any, fetch: Fetch) -> Any:
    """Returns the value of a node; modules, optimizers and the like are their state dicts.

    Args:
        node: The tree of a document.
        fetch: Returns the tensor of a name.
    """
    kind = kind_of(node)
    if isinstance(node, list):
        return [state_dicts(each, fetch) for each in node]
    if kind == "tuple":
        return tuple(state_dicts(each, fetch) for each in node["items"])
    if kind == "module":
        return _module(node, fetch)
    if kind == "optimizer":
        return _optimizer(node, fetch)
    if kind == "scaler":
        return _scaler(node, fetch)
    if kind == "stateful":
        return decode(node["state"], fetch)
    if isinstance(node, dict) and kind is None:
        return {key: state_dicts(each, fetch) for key, each in node.items()}
    return decode(node, fetch)


def _module(node: dict[str, Any], fetch: Fetch) -> dict[str, Any]:
    names = zip(node["keys"], node["names"], strict=True)
    values: dict[str, Any] = OrderedDict((key, fetch(name)) for key, name in names)
    values.update({key: decode(each, fetch) for key, each in node["extra"].items()})
    return values


def _optimizer(node: dict[str, Any], fetch: Fetch) -> dict[str, Any]:
    """Returns the state dict that torch's ``Optimizer`` gives, with its parameters numbered."""
    numbers: dict[str, int] = {}
    groups = []
    for names, hyper in zip(node["parameters"], node["groups"], strict=True):
        params = [numbers.setdefault(name, len(numbers)) for name in names]
        groups.append({**decode(hyper, fetch), "params": params})
    state: dict[Any, Any] = {
        numbers[name]: decode(values, fetch) for name, values in node["state"].items()
    }
    state.update(decode(node["loose"], fetch))
    return {"state": state, "param_groups": groups, **decode(node["others"], fetch)}


def _scaler(node: dict[str, Any], fetch: Fetch) -> dict[str, Any]:
    if not node["enabled"]:
        return {}
    scale, tracker = (decode(node[key], fetch) for key in ("scale", "growth_tracker"))
    return {
        "scale": scale.item() if isinstance(scale, Tensor) else scale,
        "growth_factor": node["growth_factor"],
        "backoff_factor": node["backoff_factor"],
        "growth_interval": node["growth_interval"],
        "_growth_tracker": tracker.item() if isinstance(tracker, Tensor) else tracker,
    }
