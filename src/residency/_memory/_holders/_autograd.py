"""What autograd keeps: the tensors that operations saved for the backward pass.

Python's garbage collector does not see them. A graph is followed from the tensors that have one,
through its nodes; what a node saved is read without unpacking it, for an unpack hook is a user's
code, and may bring bytes back to the device.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch

from residency._memory import _objects
from residency._memory._holders._walk import Origin, Walk

LEAF_OF_GRAPH = "leaf of the graph of "  # begins the path of what a graph alone keeps
_SAVED: Any = torch._C._autograd.SavedTensor  # pyright: ignore[reportAttributeAccessIssue]  # the type of a node's `_raw_saved_*` (torch 2.13)
_RAW = "_raw_saved_"


class Graphs:
    """The graphs of all tensors of a search, each node of which is followed once."""

    def __init__(self, walk: Walk) -> None:
        """Follows nothing yet."""
        self._walk = walk
        self._nodes: dict[int, Any] = {}  # wrappers, which would otherwise be made anew
        self._num_tensors = 0
        self._num_nodes = 0

    def follow(self) -> bool:
        """Goes through graphs that were not gone through before; says whether there were any."""
        walk = self._walk
        tensors, self._num_tensors = walk.tensors[self._num_tensors :], len(walk.tensors)
        nodes, self._num_nodes = walk.nodes[self._num_nodes :], len(walk.nodes)
        for position in tensors:
            self._follow_from(_objects.slot(walk.objects[position], "grad_fn"), position)
        for position in nodes:
            self._follow_from(walk.objects[position], position)
        walk.go()
        return bool(tensors or nodes)

    def clear(self) -> None:
        """Lets go of the nodes."""
        self._nodes.clear()

    def _follow_from(self, root: object, position: int) -> None:
        pending = [root]
        while pending:
            node = pending.pop()
            if node is None or id(node) in self._nodes:
                continue
            self._nodes[id(node)] = node
            name = _objects.type_name(node)
            for saved in _saved(node):
                kind = "saved" if _objects.is_a(saved, torch.Tensor) else "packed"
                self._walk.add(saved, Origin(f"{kind} by {name} for ", position, "", True, True))
            leaf = _objects.slot(node, "variable")
            if leaf is not None:
                origin = Origin(LEAF_OF_GRAPH, position, is_of_graph=True)
                self._walk.add(leaf, origin)
            if _objects.is_a(node, torch._C._FunctionBase):  # it may have attributes
                self._walk.add(node, Origin("", position, f" graph's {name}", is_of_graph=True))
            following = _objects.slot(node, "next_functions") or ()
            pending += [entry[0] for entry in following if type(entry) is tuple]


def _saved(node: object) -> Iterator[object]:
    """Yields what a node saved, as it was packed."""
    for cls in _objects.bases(type(node)):
        for name, found in _objects.type_dict(cls).items():
            if name.startswith(_RAW) and type(found) is types.GetSetDescriptorType:
                raw = _objects.slot(node, name)
                for part in raw if type(raw) in (tuple, list) else (raw,):
                    if type(part) is _SAVED and (value := _data(part)) is not None:
                        yield value


def _data(saved: Any) -> Any:
    try:
        return saved.data  # packed where there are hooks, else the tensor
    except (AttributeError, RuntimeError):  # freed, or torch before it had this
        return None
