"""A state as JSON: containers, plain values, and for each tensor a note of where its bytes lie.

Read ``_nodes`` first (the words of the format), then ``_kinds`` (how each type of value is written
and read), ``_encode`` and ``_decode``.
"""

from residency._checkpoint._document._dtypes import STORED_DTYPES as STORED_DTYPES
from residency._checkpoint._document._encode import Encoder as Encoder, Leaf as Leaf
from residency._checkpoint._document._nodes import (
    DICT as DICT,
    MAPPINGS as MAPPINGS,
    MODULE as MODULE,
    OPTIMIZER as OPTIMIZER,
    STATEFUL as STATEFUL,
    TENSOR as TENSOR,
    Node as Node,
    is_plain_dict as is_plain_dict,
    is_plain_key as is_plain_key,
    kind_of as kind_of,
    mapping_node as mapping_node,
    pairs_of as pairs_of,
    tensor_node as tensor_node,
)
from residency._checkpoint._document._notes import (
    bytes_note as bytes_note,
    elsewhere_note as elsewhere_note,
    shard_note as shard_note,
)
