"""A state as JSON: containers, plain values, and for each tensor a note of where its bytes lie.

Read ``_nodes`` first (the words of the format), then ``_kinds`` (how each type of value is written
and read), ``_encode`` and ``_decode``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency._lazy import door

if TYPE_CHECKING:
    from residency._checkpoint._document._decode import decode
    from residency._checkpoint._document._dtypes import STORED_DTYPES
    from residency._checkpoint._document._encode import Encoder, Leaf
    from residency._checkpoint._document._nodes import (
        DICT,
        MAPPINGS,
        MODULE,
        OPTIMIZER,
        STATEFUL,
        TENSOR,
        Node,
        is_plain_dict,
        is_plain_key,
        kind_of,
        mapping_node,
        pairs_of,
        tensor_node,
    )
    from residency._checkpoint._document._notes import bytes_note, elsewhere_note, shard_note

__all__ = [
    "DICT",
    "Encoder",
    "Leaf",
    "MAPPINGS",
    "MODULE",
    "Node",
    "OPTIMIZER",
    "STATEFUL",
    "STORED_DTYPES",
    "TENSOR",
    "bytes_note",
    "decode",
    "elsewhere_note",
    "is_plain_dict",
    "is_plain_key",
    "kind_of",
    "mapping_node",
    "pairs_of",
    "shard_note",
    "tensor_node",
]

__getattr__ = door(
    __name__,
    {
        "_decode": ["decode"],
        "_dtypes": ["STORED_DTYPES"],
        "_encode": ["Encoder", "Leaf"],
        "_nodes": [
            "DICT",
            "MAPPINGS",
            "MODULE",
            "Node",
            "OPTIMIZER",
            "STATEFUL",
            "TENSOR",
            "is_plain_dict",
            "is_plain_key",
            "kind_of",
            "mapping_node",
            "pairs_of",
            "tensor_node",
        ],
        "_notes": ["bytes_note", "elsewhere_note", "shard_note"],
    },
)
