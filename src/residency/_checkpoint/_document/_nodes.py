"""The kinds of nodes in a save's document, without torch: the only file that knows how a node says
of which kind it is.

A document is JSON. Lists, plain values and objects whose keys all are plain stand for themselves;
everything else is an object with its kind under ``KIND``.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from residency._errors import CorruptSaveError

Node = Any  # what json.dumps takes

KIND = "$"

BYTEARRAY = "bytearray"
BYTES = "bytes"
COMPLEX = "complex"
COUNTER = "counter"
DEFAULTDICT = "defaultdict"
DEQUE = "deque"
DEVICE = "device"
DICT = "dict"
DTYPE = "dtype"
FLOAT = "float"
FROZENSET = "frozenset"
GENERATOR = "generator"
INT = "int"
LIST = "list"
MAPPING = "mapping"
MODULE = "module"
NDARRAY = "ndarray"
OPTIMIZER = "optimizer"
ORDERED = "ordered"
SCALER = "scaler"
SET = "set"
SIZE = "size"
STATEFUL = "stateful"
STR = "str"
TENSOR = "tensor"
TUPLE = "tuple"

MAPPINGS = (DICT, ORDERED, COUNTER, DEFAULTDICT, MAPPING)
"""Mappings whose keys are nodes, and whose order or class is kept."""

ARRAYS = (NDARRAY, BYTES, BYTEARRAY, GENERATOR)
"""What may have its bytes in a tensor."""


PLAIN = frozenset((bool, int, float, str, type(None)))
"""Classes of values with no other value in them. A node of one is the value itself."""


def kind_of(node: Node) -> str | None:
    """Returns the kind of a node that has one; plain values, lists and dicts have none."""
    return node.get(KIND) if isinstance(node, dict) else None


def is_plain_dict(node: Node) -> bool:
    """Returns whether a node is an object that stands for itself."""
    return isinstance(node, dict) and KIND not in node


def is_plain_key(key: object) -> bool:
    """Returns whether a mapping with this key can stand for itself.

    JSON joins two halves of a surrogate pair to one character.
    """
    return type(key) is str and not key.startswith(KIND) and not has_halves(key)


def has_halves(text: str) -> bool:
    """Returns whether a text has half surrogates, which UTF-8 does not."""
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def is_count(value: object) -> bool:
    """Returns whether a value of JSON is a whole number from 0 on."""
    return type(value) is int and value >= 0


def is_counts(values: object) -> bool:
    """Returns whether a value of JSON is a list of whole numbers from 0 on."""
    return isinstance(values, list) and all(map(is_count, values))


def tensor_node(name: str) -> dict[str, Any]:
    """Returns the node of a tensor."""
    return {KIND: TENSOR, "name": name}


def pairs_of(node: Mapping[str, Any]) -> list[list[Node]]:
    """Returns the keys and values of a mapping's node, keys as nodes."""
    return node["items"] if KIND in node else [[key, each] for key, each in node.items()]


def mapping_node(kind: str, pairs: list[list[Node]]) -> dict[str, Any]:
    """Returns the node of a mapping that cannot stand for itself."""
    return {KIND: kind, "items": pairs}


def read_document(document: object) -> dict[str, Node]:
    """Returns the nodes of a rank's document by top-level name, with every node looked at.

    Raises:
        CorruptSaveError: The document has no tree, a node lacks what its kind has, or is nested
            deeper than a save can be. Kinds that are not known are left to the code that decodes
            them.
    """
    tree = document.get("tree") if isinstance(document, dict) else None
    if not isinstance(tree, dict) or (KIND in tree and kind_of(tree) not in MAPPINGS):
        raise CorruptSaveError("the manifest has a document without a tree.")
    _check_nodes(tree)
    found: dict[str, Node] = {}
    for name, node in pairs_of(tree):
        if not isinstance(name, str):
            raise CorruptSaveError(f"the document has {reprlib.repr(name)} for a top-level name.")
        found[name] = node
    return found


def _check_nodes(tree: Node) -> None:
    pending: list[tuple[Node, int]] = [(tree, 0)]
    while pending:
        node, depth = pending.pop()
        if depth > _MAX_DEPTH:
            raise CorruptSaveError(
                f"the document is nested deeper than {_MAX_DEPTH} levels, as no save is."
            )
        if isinstance(node, list):
            pending += _below(node, depth)
        elif isinstance(node, dict):
            if KIND in node and not _is_sensible(node, node[KIND]):
                raise CorruptSaveError(
                    f"the document has a node that makes no sense: {reprlib.repr(node)}."
                )
            pending += _below(node.values(), depth)


def _below(nodes: Iterable[Node], depth: int) -> list[tuple[Node, int]]:
    """Returns what is to be looked at; plain values are not, unless they lie too deep."""
    return [
        (each, depth + 1) for each in nodes if isinstance(each, list | dict) or depth == _MAX_DEPTH
    ]


def _is_sensible(node: Mapping[str, Any], kind: object) -> bool:
    """Returns whether a node has what those of its kind have, at the least."""
    if not isinstance(kind, str):
        return False
    for name, form in _FIELDS.get(kind, {}).items():
        if name not in node or not _fits(node[name], form):
            return False
    is_whole = _WHOLE.get(kind)
    return is_whole is None or is_whole(node)


def _fits(value: object, form: Any) -> bool:
    """Returns whether a value of JSON is of a class, a list of such, or what a function takes."""
    if isinstance(form, type):
        return isinstance(value, form)
    if isinstance(form, list):
        return isinstance(value, list) and all(_fits(each, form[0]) for each in value)
    return bool(form(value))


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2


def _is_object_of_objects(value: Any) -> bool:
    return is_plain_dict(value) and all(map(is_plain_dict, value.values()))


def _has_own_bytes(node: Mapping[str, object]) -> bool:
    return isinstance(node.get("tensor", node.get("value")), str)


def _is_whole_module(node: Mapping[str, Any]) -> bool:
    return len(node["keys"]) == len(node["names"])


def _is_whole_optimizer(node: Mapping[str, Any]) -> bool:
    """Returns whether an optimizer has the states of its own parameters, and only those."""
    names = {name for group in node["parameters"] for name in group}
    loose, others = node.get("loose") or {}, node.get("others") or {}
    return (
        len(node["groups"]) == len(node["parameters"])
        and node["state"].keys() <= names
        and not any("params" in group for group in node["groups"])
        and (is_plain_dict(loose) or kind_of(loose) in MAPPINGS)
        and is_plain_dict(others)
    )


_MAX_DEPTH = 900  # of JSON; a node takes one or two levels, and Python's stack ends before it
# What the nodes of each kind have, at the least.
_FIELDS: dict[str, dict[str, Any]] = {
    COMPLEX: {"value": list},
    COUNTER: {"items": [_is_pair]},
    DEFAULTDICT: {"items": [_is_pair], "factory": str},
    DEQUE: {"items": list},
    DEVICE: {"value": str},
    DICT: {"items": [_is_pair]},
    DTYPE: {"value": str},
    FLOAT: {"value": str},
    FROZENSET: {"items": list},
    GENERATOR: {"device": str},
    INT: {"value": str},
    MAPPING: {"items": [_is_pair], "class": str},
    MODULE: {"keys": [str], "names": [str], "extra": is_plain_dict},
    NDARRAY: {"dtype": str, "shape": is_counts},
    OPTIMIZER: {
        "parameters": [[str]],
        "groups": [is_plain_dict],
        "state": _is_object_of_objects,
    },
    ORDERED: {"items": [_is_pair]},
    SCALER: {"state": is_plain_dict},
    SET: {"items": list},
    SIZE: {"items": list},
    STATEFUL: {"class": str, "state": object},
    STR: {"value": str},
    TENSOR: {"name": str},
    TUPLE: {"items": list},
}
# What has to agree among the fields of a node.
_WHOLE: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    **dict.fromkeys(ARRAYS, _has_own_bytes),
    MODULE: _is_whole_module,
    OPTIMIZER: _is_whole_optimizer,
}
