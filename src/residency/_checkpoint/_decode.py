"""Turns the nodes of a save's document back into values: the counterpart of the encoder.

No pickle and no import by name: every kind is one of this table, and a node of another is damage.
"""

from __future__ import annotations

import base64
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from residency._errors import CorruptSaveError

Fetch = Callable[[str], Tensor]


def kind_of(node: Any) -> str | None:
    """Returns the kind of a node that has one; plain values, lists and dicts have none."""
    return node.get("$") if isinstance(node, dict) else None


def tensor_names(node: Any) -> Iterator[str]:
    """Yields the names of all tensors that a node's value is made of."""
    if isinstance(node, list):
        for each in node:
            yield from tensor_names(each)
    elif isinstance(node, dict):
        kind = node.get("$")
        if kind == "tensor":
            yield node["name"]
        elif kind in ("ndarray", "bytes", "bytearray"):
            if "tensor" in node:
                yield node["tensor"]
        else:
            for each in node.values():
                yield from tensor_names(each)


def decode(node: Any, fetch: Fetch) -> Any:
    """Returns the value of a node.

    Args:
        node: What JSON gave.
        fetch: Returns the tensor of a name, with its bytes.

    Raises:
        CorruptSaveError: The node is of no kind that a save has.
    """
    if isinstance(node, list):
        return [decode(each, fetch) for each in node]
    if not isinstance(node, dict):
        return node
    kind = node.get("$")
    if kind is None:
        return {key: decode(each, fetch) for key, each in node.items()}
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise CorruptSaveError(
            f"the save has a node of kind {kind!r} where a value is expected; this release of "
            "residency does not know it."
        )
    return decoder(node, fetch)


def _items(node: Any, fetch: Fetch) -> list[Any]:
    return [decode(each, fetch) for each in node["items"]]


def _pairs(node: Any, fetch: Fetch) -> list[tuple[Any, Any]]:
    return [(decode(key, fetch), decode(value, fetch)) for key, value in node["items"]]


def _complex(node: Any, fetch: Fetch) -> complex:
    real, imaginary = (decode(each, fetch) for each in node["value"])
    return complex(real, imaginary)


def _bytes(node: Any, fetch: Fetch) -> bytes:
    if "tensor" in node:
        return bytes(fetch(node["tensor"]).numpy())
    return base64.b64decode(node["value"])


def _dtype(node: Any, fetch: Fetch) -> torch.dtype:
    found = getattr(torch, node["value"], None)
    if not isinstance(found, torch.dtype):
        raise CorruptSaveError(f"this torch has no dtype {node['value']!r}, which the save names.")
    return found


def _array(node: Any, fetch: Fetch) -> Any:
    import numpy

    # A copy: the array owns what it has, as the one that was saved did.
    array = numpy.frombuffer(bytes(fetch(node["tensor"]).numpy()), dtype=node["dtype"])
    array = array.reshape(node["shape"]).copy()
    return array[()] if node.get("is_scalar") else array


_DECODERS: dict[str, Callable[[Any, Fetch], Any]] = {
    "bytearray": lambda node, fetch: bytearray(_bytes(node, fetch)),
    "bytes": _bytes,
    "complex": _complex,
    "deque": lambda node, fetch: deque(_items(node, fetch)),
    "device": lambda node, fetch: torch.device(node["value"]),
    "dict": lambda node, fetch: dict(_pairs(node, fetch)),
    "dtype": _dtype,
    "float": lambda node, fetch: float(node["value"]),
    "frozenset": lambda node, fetch: frozenset(_items(node, fetch)),
    "ndarray": _array,
    "ordered": lambda node, fetch: OrderedDict(_pairs(node, fetch)),
    "set": lambda node, fetch: set(_items(node, fetch)),
    "size": lambda node, fetch: torch.Size(_items(node, fetch)),
    "tensor": lambda node, fetch: fetch(node["name"]),
    "tuple": lambda node, fetch: tuple(_items(node, fetch)),
}
