"""Turns the nodes of a save's document back into values: the counterpart of the encoder.

No pickle and no import by name: every kind is one of this table, and a node of another is damage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from residency._checkpoint._document import _nodes
from residency._checkpoint._document._kinds import kind_named
from residency._checkpoint._document._nodes import kind_of
from residency._errors import CorruptSaveError

Fetch = Callable[[str], Tensor]
Objects = Mapping[str, Callable[[Any, "Decoder"], Any]]


def tensor_nodes(node: object) -> Iterator[dict[str, Any]]:
    """Yields the nodes of the tensors that a node's value has in it."""
    if isinstance(node, list):
        for each in node:
            yield from tensor_nodes(each)
    elif isinstance(node, dict):
        if kind_of(node) == _nodes.TENSOR:
            yield node
        else:
            for each in node.values():
                yield from tensor_nodes(each)


def tensor_names(node: object) -> Iterator[str]:
    """Yields the names of all tensors that a node's value is made of."""
    if isinstance(node, list):
        for each in node:
            yield from tensor_names(each)
    elif isinstance(node, dict):
        kind = kind_of(node)
        if kind == _nodes.TENSOR:
            yield node["name"]
        elif kind in _nodes.ARRAYS:
            if "tensor" in node:
                yield node["tensor"]
        else:
            for each in node.values():
                yield from tensor_names(each)


def decode(node: object, fetch: Fetch, objects: Objects | None = None) -> Any:
    """Returns the value of a node.

    Args:
        node: What JSON gave.
        fetch: Returns the tensor of a name, with its bytes.
        objects: What makes the values of nodes of objects, by kind.

    Raises:
        CorruptSaveError: The node is of no kind that a save has.
    """
    return Decoder(fetch, objects or {}).value(node)


@dataclass(frozen=True, slots=True)
class Decoder:
    """A maker of values from nodes.

    Attributes:
        fetch: Returns the tensor of a name, with its bytes.
        objects: What makes the values of nodes of objects, by kind.
    """

    fetch: Fetch
    objects: Objects

    def value(self, node: Any) -> Any:
        """Returns the value of a node; see ``decode``."""
        if isinstance(node, list):
            return [self.value(each) for each in node]
        if not isinstance(node, dict):
            return node
        label = kind_of(node)
        if label is None:
            return {key: self.value(each) for key, each in node.items()}
        if label == _nodes.TENSOR:
            return self.fetch(node["name"])
        if label in self.objects:
            return self.objects[label](node, self)
        kind = kind_named(label)
        if kind is None:
            raise CorruptSaveError(
                f"the save has a node of kind {label!r} where a value is expected; this release of "
                "residency does not know it."
            )
        return kind.decode(self, node)
