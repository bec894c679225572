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
    return (each for each in _nodes_in(node) if kind_of(each) == _nodes.TENSOR)


def tensor_names(node: object) -> Iterator[str]:
    """Yields the names of all tensors that a node's value is made of."""
    for each in _nodes_in(node):
        kind = kind_of(each)
        if kind == _nodes.TENSOR:
            yield each["name"]
        elif kind in _nodes.ARRAYS and "tensor" in each:
            yield each["tensor"]
        elif kind == _nodes.MODULE:
            yield from each["names"]


def _nodes_in(node: object) -> Iterator[dict[str, Any]]:
    """Yields a node and those in it that are objects, without a call for each level: a document
    may be nested deeper than Python's stack.
    """
    pending = [node]
    while pending:
        each = pending.pop()
        if isinstance(each, list):
            pending += reversed(each)
        elif isinstance(each, dict):
            yield each
            pending += reversed(each.values())


def pairs_if_alike(left: object, right: object) -> list[tuple[str, str]] | None:
    """Pairs the names of the tensors in two nodes that say the same but for these names.

    Args:
        left: A node.
        right: Another one.

    Returns:
        The names in both; None where the nodes say something else besides. What they say is the
        same where the tensors' bytes are.
    """
    found: list[tuple[str, str]] = []
    pending: list[tuple[Any, Any]] = [(left, right)]
    while pending:
        mine, theirs = pending.pop()
        if type(mine) is not type(theirs):
            return None
        if isinstance(mine, dict):
            ours, others = _without_names(mine), _without_names(theirs)
            if ours[1].keys() != others[1].keys() or ours[0].keys() != others[0].keys():
                return None
            found += [(name, others[0][key]) for key, name in ours[0].items()]
            pending += [(each, others[1][key]) for key, each in ours[1].items()]
        elif isinstance(mine, list):
            if len(mine) != len(theirs):
                return None
            pending += zip(mine, theirs, strict=True)
        elif repr(mine) != repr(theirs):  # tells 0.0 from -0.0
            return None
    return found


def _without_names(node: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """Splits a node into the names of tensors that it has itself, and all else."""
    rest, kind = dict(node), kind_of(node)
    if kind == _nodes.TENSOR:
        return {"name": rest.pop("name")}, rest
    if kind in _nodes.ARRAYS and "tensor" in rest:
        return {"tensor": rest.pop("tensor")}, rest
    if kind == _nodes.MODULE:
        return dict(zip(rest.pop("keys"), rest.pop("names"), strict=True)), rest
    if kind in (_nodes.SET, _nodes.FROZENSET):
        rest["items"] = sorted(rest["items"], key=repr)
    return {}, rest


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
                f"the save has a node of kind {label!r} instead of a value; this release of "
                "residency does not know it."
            )
        return kind.decode(self, node)
