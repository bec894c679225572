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


def is_number(value: object) -> bool:
    """Returns whether a value of JSON is a number."""
    return type(value) in (int, float)


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
            fields = _FIELDS.get(node[KIND]) if isinstance(node.get(KIND), str) else None
            if KIND in node and not isinstance(node[KIND], str):
                raise _senseless(node)
            for name, is_fit in (fields or {}).items():
                if name not in node or not is_fit(node[name]):
                    raise _senseless(node)
            if not all(is_fit(node) for is_fit in _FITS):
                raise _senseless(node)
            pending += _below(node.values(), depth)


def _below(nodes: Iterable[Node], depth: int) -> list[tuple[Node, int]]:
    """Returns what is to be looked at; plain values are not, unless they lie too deep."""
    return [
        (each, depth + 1) for each in nodes if isinstance(each, list | dict) or depth == _MAX_DEPTH
    ]


def _has_own_bytes(node: Mapping[str, object]) -> bool:
    if node.get(KIND) not in ARRAYS:
        return True
    return isinstance(node.get("tensor", node.get("value")), str)


def _is_matched(node: Mapping[str, Any]) -> bool:
    """Returns whether lists that go along with each other are as long."""
    pairs = {MODULE: ("keys", "names"), OPTIMIZER: ("groups", "parameters")}
    first, second = pairs.get(node.get(KIND, ""), (None, None))
    return first is None or second is None or len(node[first]) == len(node[second])


def _is_whole_scaler(node: Mapping[str, object]) -> bool:
    if node.get(KIND) != SCALER or not node["enabled"]:
        return True
    return all(name in node and is_number(node[name]) for name in _SCALER) and all(
        name in node and (kind_of(node[name]) in (TENSOR, FLOAT, INT) or is_number(node[name]))
        for name in _SCALER_TENSORS
    )


def _is_whole_optimizer(node: Mapping[str, Any]) -> bool:
    """Returns whether an optimizer has the states of its own parameters, and only those."""
    if node.get(KIND) != OPTIMIZER:
        return True
    names = {name for group in node["parameters"] for name in group}
    loose, others = node.get("loose") or {}, node.get("others") or {}
    return (
        node["state"].keys() <= names
        and not any("params" in group for group in node["groups"])
        and (is_plain_dict(loose) or kind_of(loose) in MAPPINGS)
        and is_plain_dict(others)
    )


def _senseless(node: Node) -> CorruptSaveError:
    return CorruptSaveError(f"the document has a node that makes no sense: {reprlib.repr(node)}.")


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _is_anything(value: object) -> bool:
    return True


def _is_pairs(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(e, list) and len(e) == 2 for e in value)


def _is_objects(value: object) -> bool:
    return isinstance(value, list) and all(map(is_plain_dict, value))


def _is_lists_of_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_texts, value))


def _is_object_of_objects(value: Any) -> bool:
    return is_plain_dict(value) and all(map(is_plain_dict, value.values()))


_SCALER = ("growth_factor", "backoff_factor", "growth_interval")
_SCALER_TENSORS = ("scale", "growth_tracker")
_FITS = (_has_own_bytes, _is_whole_scaler, _is_whole_optimizer, _is_matched)
_MAX_DEPTH = 900  # of JSON; a node takes one or two levels, and Python's stack ends before it
# What the nodes of each kind have, at the least.
_FIELDS: dict[str, dict[str, Callable[[Any], bool]]] = {
    COMPLEX: {"value": _is_list},
    COUNTER: {"items": _is_pairs},
    DEFAULTDICT: {"items": _is_pairs, "factory": _is_text},
    DEQUE: {"items": _is_list},
    DEVICE: {"value": _is_text},
    DICT: {"items": _is_pairs},
    DTYPE: {"value": _is_text},
    FLOAT: {"value": _is_text},
    FROZENSET: {"items": _is_list},
    GENERATOR: {"device": _is_text},
    INT: {"value": _is_text},
    MAPPING: {"items": _is_pairs, "class": _is_text},
    MODULE: {"keys": _is_texts, "names": _is_texts, "extra": is_plain_dict},
    NDARRAY: {"dtype": _is_text, "shape": is_counts},
    OPTIMIZER: {
        "parameters": _is_lists_of_texts,
        "groups": _is_objects,
        "state": _is_object_of_objects,
    },
    ORDERED: {"items": _is_pairs},
    SCALER: {"enabled": _is_anything},
    SET: {"items": _is_list},
    SIZE: {"items": _is_list},
    STATEFUL: {"class": _is_text, "state": _is_anything},
    STR: {"value": _is_text},
    TENSOR: {"name": _is_text},
    TUPLE: {"items": _is_list},
}
