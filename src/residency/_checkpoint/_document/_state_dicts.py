"""Makes of a document's nodes what a snapshot shows: objects as the state dicts that they gave."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from residency._checkpoint._document._decode import Decoder, Fetch, Objects, decode
from residency._checkpoint._document._nodes import MAPPING, MODULE, OPTIMIZER, SCALER, STATEFUL


def state_dicts(node: object, fetch: Fetch) -> Any:
    """Returns the value of a node; modules, optimizers and the like are their state dicts.

    Args:
        node: The tree of a document.
        fetch: Returns the tensor of a name.
    """
    return decode(node, fetch, _OBJECTS)


def _mapping(node: dict[str, Any], decoder: Decoder) -> dict[Any, Any]:
    return {decoder.value(key): decoder.value(each) for key, each in node["items"]}


def _module(node: dict[str, Any], decoder: Decoder) -> dict[str, Any]:
    names = zip(node["keys"], node["names"], strict=True)
    values: dict[str, Any] = OrderedDict((key, decoder.fetch(name)) for key, name in names)
    values.update({key: decoder.value(each) for key, each in node["extra"].items()})
    return values


def _optimizer(node: dict[str, Any], decoder: Decoder) -> dict[str, Any]:
    """Returns the state dict that torch's ``Optimizer`` gives, with its parameters numbered."""
    numbers: dict[str, int] = {}
    groups = []
    for names, hyper in zip(node["parameters"], node["groups"], strict=True):
        params = [numbers.setdefault(name, len(numbers)) for name in names]
        groups.append({**decoder.value(hyper), "params": params})
    state: dict[Any, Any] = {
        numbers[name]: decoder.value(values) for name, values in node["state"].items()
    }
    state.update(decoder.value(node["loose"]))
    return {"state": state, "param_groups": groups, **decoder.value(node["others"])}


def scaler_state(found: Mapping[str, Any]) -> dict[str, float]:
    """Returns the state dict of a ``GradScaler``, of which a save has tensors."""
    return {key: kind(found[key]) for key, kind in _SCALER.items()} if found else {}


_SCALER: dict[str, Callable[[Any], float]] = {
    "scale": float,
    "growth_factor": float,
    "backoff_factor": float,
    "growth_interval": int,
    "_growth_tracker": int,
}
_OBJECTS: Objects = {
    MAPPING: _mapping,
    MODULE: _module,
    OPTIMIZER: _optimizer,
    SCALER: lambda node, decoder: scaler_state(decoder.value(node["state"])),
    STATEFUL: lambda node, decoder: decoder.value(node["state"]),
}
