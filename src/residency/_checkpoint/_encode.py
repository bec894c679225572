"""Turns Python values into the JSON nodes of a save's document; tensors become named leaves.

No pickle: a value of a kind that is not listed here is refused by its name. Invariant: what is
encoded shares nothing mutable with the caller, except the tensors, which the leaves hold.
"""

from __future__ import annotations

import base64
import math
import sys
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor

from residency._errors import RefusedError
from residency._transfer import Lent

Node = Any  # what json.dumps takes

_LABELS: dict[type, str] = {
    torch.Size: "size",
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    deque: "deque",
}
_MAX_INLINE_BYTES = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """Is a tensor of a state tree.

    Attributes:
        name: The dotted path.
        value: What the caller has, detached; a ``DTensor`` of a sharded one.
        is_early: Whether others than optimizers may change it, so that it is copied first.
        lent: The loan, of a state that lives on the host.
    """

    name: str
    value: Tensor
    is_early: bool
    lent: Lent | None = None


class Encoder:
    """Encodes values and collects their tensors.

    Attributes:
        leaves: The tensors by name, in the order in which they were met.
    """

    def __init__(self) -> None:
        self.leaves: dict[str, Leaf] = {}

    def tensor(
        self, name: str, value: Tensor, *, is_early: bool = True, lent: Lent | None = None
    ) -> Node:
        """Returns the node of a tensor, and takes it among the leaves.

        Raises:
            RefusedError: Two values have this name.
        """
        if name in self.leaves:
            raise RefusedError(
                f"two tensors of the state have the name {name!r}: a key with a dot in it meets a "
                "path of the same spelling. Nothing was saved; rename one of the keys."
            )
        self.leaves[name] = Leaf(name, value.detach(), is_early, lent)
        return {"$": "tensor", "name": name}

    def node(self, name: str, value: Any) -> Node:
        """Returns the node of any value.

        Raises:
            RefusedError: The value, or one inside it, is of a kind that a save does not hold.
        """
        if value is None or (isinstance(value, bool | str) and type(value) in (bool, str)):
            return value
        if type(value) is int:
            return value
        if type(value) is float:
            return _float(value)
        if isinstance(value, Lent):
            return self.tensor(name, value.value, lent=value)
        if isinstance(value, Tensor):
            return self.tensor(name, value)
        if isinstance(value, Mapping):
            return self._mapping(name, value)
        if type(value) is list:
            return self._items(name, value)
        label = _LABELS.get(type(value))
        if label is not None:
            return {"$": label, "items": self._items(name, value)}
        return self._scalar(name, value)

    def _scalar(self, name: str, value: Any) -> Node:
        if type(value) is complex:
            return {"$": "complex", "value": [_float(value.real), _float(value.imag)]}
        if type(value) in (bytes, bytearray):
            label = type(value).__name__
            if len(value) > _MAX_INLINE_BYTES:
                data = torch.frombuffer(bytearray(value), dtype=torch.uint8)
                return {"$": label, "tensor": self.tensor(name, data)["name"]}
            return {"$": label, "value": base64.b64encode(value).decode("ascii")}
        if isinstance(value, torch.dtype):
            return {"$": "dtype", "value": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"$": "device", "value": str(value)}
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
            return self._array(name, value, numpy)
        hint = "give one of those instead"
        if is_dataclass(value):
            hint = "give it these two methods, or save dataclasses.asdict of it"
        raise RefusedError(
            f"{name or 'the state'} is a {type(value).__module__}.{type(value).__qualname__}, and "
            "a save holds tensors, arrays, plain Python values and containers of them, and objects "
            f"with state_dict and load_state_dict. Nothing was saved; {hint}."
        )

    def _array(self, name: str, value: Any, numpy: Any) -> Node:
        if value.dtype.hasobject or value.dtype.names is not None:
            raise RefusedError(
                f"{name} is a numpy array of {value.dtype}, whose bytes mean nothing in another "
                "process. Nothing was saved; give an array of numbers."
            )
        stored = torch.from_numpy(numpy.array(value).reshape(-1).view("u1"))  # a copy
        return {
            "$": "ndarray",
            "tensor": self.tensor(name, stored)["name"],
            "dtype": value.dtype.str,
            "shape": list(value.shape),
            "is_scalar": not isinstance(value, numpy.ndarray),
        }

    def _mapping(self, name: str, value: Mapping[Any, Any]) -> Node:
        if type(value) is OrderedDict:
            return {"$": "ordered", "items": self._pairs(name, value)}
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.node(joined(name, key), each) for key, each in value.items()}
        return {"$": "dict", "items": self._pairs(name, value)}

    def _pairs(self, name: str, value: Mapping[Any, Any]) -> list[Node]:
        return [
            [self.node(joined(name, "key"), key), self.node(joined(name, key), each)]
            for key, each in value.items()
        ]

    def _items(self, name: str, values: Iterable[Any]) -> list[Node]:
        return [self.node(joined(name, index), each) for index, each in enumerate(values)]


def check_is_finite(value: Any, name: str = "") -> None:
    """Looks through the containers of a state for one that contains itself.

    Raises:
        RefusedError: By the path at which it stands again.
    """
    _check_is_finite(value, name, {})


def _check_is_finite(value: Any, name: str, around: dict[int, str]) -> None:
    if not isinstance(value, Mapping | list | tuple | deque):
        return
    if id(value) in around:
        raise RefusedError(
            f"{name} is {around[id(value)] or 'the state'} again, which contains it: a save of "
            "it would have no end. Nothing was saved; take the inner one out."
        )
    around[id(value)] = name
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    try:
        for key, each in items:
            _check_is_finite(each, joined(name, key), around)
    except RecursionError:
        raise RefusedError(
            f"{name.partition('.')[0] or 'the state'} is nested deeper than Python can follow. "
            "Nothing was saved; make it flatter."
        ) from None
    del around[id(value)]


def joined(name: str, key: object) -> str:
    """Returns the dotted path of a key below a name."""
    return f"{name}.{key}" if name else str(key)


def _float(value: float) -> Node:
    if math.isfinite(value):
        return value
    return {"$": "float", "value": "nan" if math.isnan(value) else str(value)}
