"""The kinds of values that a save holds: how each is known, written, read and filled in place.

One table for both directions. Invariant, which ``tests/checkpoint/restore/test_kinds.py`` tries to
break: a value is of a kind by its very class, never by one that it inherits from; what is written
of a value of a kind gives, read again, an equal value of the same class.
"""

from __future__ import annotations

import base64
import math
import re
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from residency._checkpoint._document import _nodes
from residency._checkpoint._document._dtypes import dtype_named, name_of
from residency._checkpoint._document._nodes import (
    KIND,
    Node,
    has_halves,
    is_plain_key,
    mapping_node,
)
from residency._errors import CorruptSaveError, RefusedError

if TYPE_CHECKING:
    from residency._checkpoint._document._decode import Decoder
    from residency._checkpoint._document._encode import Encoder

_MAX_INLINE_BYTES = 4096
_MAX_PLAIN_BITS = 64  # Python alone reads longer numbers, and those of 4300 digits not even it
_FLOAT = struct.Struct(">d")  # of what JSON has no word for: the infinite, and NaN of any bits
# Numbers, texts, dates and raw bytes, as numpy spells them in `dtype.str`: all that is written.
_ARRAY_DTYPE = re.compile(r"[<>|][biufcmMSUV]\d{1,9}(\[\d{0,9}[A-Za-z]{1,3}\])?")

# What a defaultdict may call for a key that it does not have. None of them can run other code.
_FACTORIES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (dict, list, set, int, float, str, bool, tuple, Counter, OrderedDict, deque)
}
_FACTORIES["None"] = None


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of value.

    Attributes:
        label: What its nodes say of themselves.
        type: The class; None where that is in a package that need not be there.
        encode: Makes a node of a value of that name.
        decode: Makes a value of a node.
        put: Gives an object of the class that is there the contents of another; False where it
            cannot, and the other one is to stand in its place.
    """

    label: str
    type: type | None
    encode: Callable[[Encoder, str, Any], Node]
    decode: Callable[[Decoder, Any], Any]
    put: Callable[[Any, Any], bool] = lambda there, found: False


def kind_for(value: Any) -> Kind | None:
    """Returns the kind of a value, or None where a save has no place for its class."""
    found = _BY_TYPE.get(type(value))
    if found is not None:
        return found
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    is_scalar = isinstance(value, numpy.generic) and type(value) is value.dtype.type
    return _BY_LABEL[_nodes.NDARRAY] if is_scalar or type(value) is numpy.ndarray else None


def kind_named(label: str | None) -> Kind | None:
    """Returns the kind whose nodes bear a label."""
    return _BY_LABEL.get(label) if isinstance(label, str) else None


def _plain(writer: Encoder, name: str, value: object) -> Node:
    return value


def _no_node(reader: Decoder, node: Node) -> object:
    raise CorruptSaveError(f"a {node[KIND]} stands for itself in a save, and here has a node.")


def _encode_str(writer: Encoder, name: str, value: str) -> Node:
    if not has_halves(value):
        return value
    return {KIND: _nodes.STR, "value": _in_base64(value.encode("utf-8", "surrogatepass"))}


def _decode_str(reader: Decoder, node: Any) -> str:
    return _of_base64(node["value"]).decode("utf-8", "surrogatepass")


def _encode_int(writer: Encoder, name: str, value: int) -> Node:
    if value.bit_length() <= _MAX_PLAIN_BITS:
        return value
    return {KIND: _nodes.INT, "value": hex(value)}


def _encode_float(writer: Encoder, name: str, value: float) -> Node:
    if math.isfinite(value):
        return value
    return {KIND: _nodes.FLOAT, "value": _FLOAT.pack(value).hex()}


def _decode_float(reader: Decoder, node: Any) -> float:
    found: float = _FLOAT.unpack(bytes.fromhex(node["value"]))[0]
    return found


def _encode_complex(writer: Encoder, name: str, value: complex) -> Node:
    parts = [_encode_float(writer, name, each) for each in (value.real, value.imag)]
    return {KIND: _nodes.COMPLEX, "value": parts}


def _decode_complex(reader: Decoder, node: Any) -> complex:
    real, imaginary = (reader.value(each) for each in node["value"])
    return complex(real, imaginary)


def _encode_bytes(writer: Encoder, name: str, value: bytes | bytearray) -> Node:
    label = _nodes.BYTES if type(value) is bytes else _nodes.BYTEARRAY
    if len(value) <= _MAX_INLINE_BYTES or writer.is_inline:
        return {KIND: label, **inline_bytes(bytes(value))}
    return {KIND: label, **writer.bytes_of(name, bytearray(value))}


def _stored(reader: Decoder, node: Node) -> Any:
    """Returns the bytes of a node, wherever they are, as what others make a copy of."""
    if "tensor" not in node:
        return _of_base64(node["value"])
    found = reader.fetch(node["tensor"])
    if found.dtype != torch.uint8 or found.dim() != 1 or not found.is_contiguous():
        raise CorruptSaveError(f"the tensor {node['tensor']!r} is not the bytes of a value.")
    return found.numpy()


def _encode_generator(writer: Encoder, name: str, value: torch.Generator) -> Node:
    # Of whatever device, it keeps its state on the host.
    state = _encode_bytes(writer, name, bytearray(value.get_state().numpy()))
    return {**state, KIND: _nodes.GENERATOR, "device": str(value.device)}


def _decode_generator(reader: Decoder, node: Any) -> torch.Generator:
    try:
        found = torch.Generator(node["device"])
    except RuntimeError as error:
        raise RefusedError(
            f"the save has a random generator of {node['device']}, and there is none here "
            f"({str(error).splitlines()[0]}). Restore on such a device, or leave it out of the "
            "state."
        ) from error
    state = bytearray(_stored(reader, node))
    found.set_state(torch.frombuffer(state, dtype=torch.uint8))
    return found


def _put_generator(there: torch.Generator, found: torch.Generator) -> bool:
    if there.device.type != found.device.type:
        return False
    there.set_state(found.get_state())
    return True


def inline_bytes(value: bytes) -> dict[str, Any]:
    """Returns what a node has of bytes that stand in it."""
    return {"value": _in_base64(value)}


def _in_base64(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def _of_base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _put_bytearray(there: bytearray, found: bytearray) -> bool:
    try:
        there[:] = found
    except BufferError:  # of another length, and an array lies over it
        return False
    return True


def _encode_array(writer: Encoder, name: str, value: Any) -> Node:
    import numpy

    dtype = value.dtype
    # A dtype of another package has a name that numpy knows nothing of, or takes for another.
    if dtype.hasobject or dtype.names is not None or numpy.dtype(dtype.str) != dtype:
        raise RefusedError(
            f"{name} is a numpy array of {dtype}, whose bytes mean nothing in another "
            "process. Nothing was saved; give an array of numbers."
        )
    is_scalar = not isinstance(value, numpy.ndarray)
    is_turned = not is_scalar and value.flags.f_contiguous and not value.flags.c_contiguous
    copied = numpy.array(value, order="F" if is_turned else "C", ndmin=1)
    flat = copied.reshape(-1, order="F" if is_turned else "C")
    data = flat.view("u1") if flat.nbytes else numpy.empty(0, "u1")
    return {
        KIND: _nodes.NDARRAY,
        **(inline_bytes(data.tobytes()) if is_scalar else writer.bytes_of(name, data)),
        "dtype": dtype.str,
        "shape": list(value.shape),
        "is_scalar": is_scalar,
        **({"order": "F"} if is_turned else {}),
    }


@dataclass(frozen=True, slots=True)
class ArrayForm:
    """An array but for its bytes, as a node tells of it.

    Attributes:
        dtype: Numpy's.
        shape: The array's.
        order: In which its bytes were written: "C", rows first, or "F", columns first.
    """

    dtype: Any
    shape: tuple[int, ...]
    order: Any

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)


def array_form(node: Node) -> ArrayForm:
    """Returns the form of an array's node.

    Raises:
        CorruptSaveError: It is none that is written.
    """
    import numpy

    spelled, order = node["dtype"], node.get("order", "C")
    dtype = numpy.dtype(spelled) if _ARRAY_DTYPE.fullmatch(spelled) else None
    if dtype is None or dtype.str != spelled or order not in ("C", "F"):
        raise CorruptSaveError(f"the save has no array of dtype {spelled[:40]!r} in {order!r}.")
    return ArrayForm(dtype, tuple(node["shape"]), order)


def _decode_array(reader: Decoder, node: Node) -> Any:
    import numpy

    form, data = array_form(node), _stored(reader, node)
    if len(data) != form.num_bytes:
        raise CorruptSaveError(f"an array of {form.num_bytes} bytes has {len(data)} in the save.")
    # A copy: the array owns what it has, as the one that was saved did.
    array = numpy.empty(form.shape, form.dtype, order=form.order)
    if form.num_bytes:
        flat = array.reshape(-1, order=form.order).view("u1")
        flat[:] = numpy.frombuffer(data, "u1")
    return array[()] if node.get("is_scalar") else array


def _put_array(there: Any, found: Any) -> bool:
    if not there.flags.writeable or (there.shape, there.dtype) != (found.shape, found.dtype):
        return False
    there[...] = found
    return True


def _encode_dict(writer: Encoder, name: str, value: dict[object, object]) -> Node:
    pairs = writer.pairs(name, value)
    if all(map(is_plain_key, value)):
        return dict(pairs)
    return mapping_node(_nodes.DICT, pairs)


def _encode_ordered(writer: Encoder, name: str, value: OrderedDict[object, object]) -> Node:
    node = mapping_node(_nodes.ORDERED, writer.pairs(name, value))
    # Where a module's state dict has the versions of its parts.
    metadata = vars(value).get("_metadata")
    if type(metadata) in (dict, OrderedDict):
        node["metadata"] = writer.plain(f"{name}._metadata", metadata)
    return node


def _decode_ordered(reader: Decoder, node: Any) -> OrderedDict[Any, Any]:
    found: OrderedDict[Any, Any] = OrderedDict(_pairs(reader, node))
    if "metadata" in node:
        vars(found)["_metadata"] = reader.value(node["metadata"])
    return found


def _encode_default(writer: Encoder, name: str, value: defaultdict[object, object]) -> Node:
    factory = next((n for n, each in _FACTORIES.items() if each is value.default_factory), None)
    if factory is None:
        raise RefusedError(
            f"{name or 'the state'} is a defaultdict of {value.default_factory!r}, which is code, "
            f"and a save holds none but {', '.join(_FACTORIES)}. Nothing was saved; give dict(it)."
        )
    return {**mapping_node(_nodes.DEFAULTDICT, writer.pairs(name, value)), "factory": factory}


def _decode_default(reader: Decoder, node: Any) -> defaultdict[Any, Any]:
    if node["factory"] not in _FACTORIES:
        raise CorruptSaveError(f"the save names {node['factory']!r} for a defaultdict.")
    return defaultdict(_FACTORIES[node["factory"]], _pairs(reader, node))


def _encode_deque(writer: Encoder, name: str, value: deque[object]) -> Node:
    node = {KIND: _nodes.DEQUE, "items": writer.plain_items(name, value)}
    return node if value.maxlen is None else {**node, "maxlen": value.maxlen}


def _put_deque(there: deque[object], found: deque[object]) -> bool:
    if there.maxlen is not None and len(found) > there.maxlen:
        return False
    there.clear()
    there.extend(found)
    return True


def _put_set(there: set[object], found: set[object]) -> bool:
    there.clear()
    there.update(found)
    return True


def _items(reader: Decoder, node: Any) -> list[Any]:
    return [reader.value(each) for each in node["items"]]


def _pairs(reader: Decoder, node: Any) -> list[tuple[Any, Any]]:
    return [(reader.value(key), reader.value(value)) for key, value in node["items"]]


def _labelled(label: str) -> Callable[[Encoder, str, Any], Node]:
    return lambda writer, name, value: {KIND: label, "items": writer.plain_items(name, value)}


_KINDS = (
    Kind("none", type(None), _plain, _no_node),
    Kind("bool", bool, _plain, _no_node),
    Kind(_nodes.INT, int, _encode_int, lambda reader, node: int(node["value"], 16)),
    Kind(_nodes.FLOAT, float, _encode_float, _decode_float),
    Kind(_nodes.STR, str, _encode_str, _decode_str),
    Kind(_nodes.COMPLEX, complex, _encode_complex, _decode_complex),
    Kind(
        _nodes.BYTES,
        bytes,
        _encode_bytes,
        lambda reader, node: bytes(_stored(reader, node)),
    ),
    Kind(
        _nodes.BYTEARRAY,
        bytearray,
        _encode_bytes,
        lambda reader, node: bytearray(_stored(reader, node)),
        _put_bytearray,
    ),
    Kind(
        _nodes.DTYPE,
        torch.dtype,
        lambda writer, name, value: {KIND: _nodes.DTYPE, "value": name_of(value)},
        lambda reader, node: dtype_named(node["value"]),
    ),
    Kind(
        _nodes.DEVICE,
        torch.device,
        lambda writer, name, value: {KIND: _nodes.DEVICE, "value": str(value)},
        lambda reader, node: torch.device(node["value"]),
    ),
    Kind(_nodes.GENERATOR, torch.Generator, _encode_generator, _decode_generator, _put_generator),
    Kind(_nodes.NDARRAY, None, _encode_array, _decode_array, _put_array),
    Kind(_nodes.LIST, list, lambda w, name, value: w.items(name, value), _no_node),
    Kind(
        _nodes.TUPLE,
        tuple,
        lambda w, name, value: {KIND: _nodes.TUPLE, "items": w.items(name, value)},
        lambda reader, node: tuple(_items(reader, node)),
    ),
    Kind(
        _nodes.SIZE,
        torch.Size,
        _labelled(_nodes.SIZE),
        lambda reader, node: torch.Size(_items(reader, node)),
    ),
    Kind(
        _nodes.SET,
        set,
        _labelled(_nodes.SET),
        lambda reader, node: set(_items(reader, node)),
        _put_set,
    ),
    Kind(
        _nodes.FROZENSET,
        frozenset,
        _labelled(_nodes.FROZENSET),
        lambda reader, node: frozenset(_items(reader, node)),
    ),
    Kind(
        _nodes.DEQUE,
        deque,
        _encode_deque,
        lambda reader, node: deque(_items(reader, node), node.get("maxlen")),
        _put_deque,
    ),
    Kind(_nodes.DICT, dict, _encode_dict, lambda reader, node: dict(_pairs(reader, node))),
    Kind(_nodes.ORDERED, OrderedDict, _encode_ordered, _decode_ordered),
    Kind(
        _nodes.COUNTER,
        Counter,
        lambda writer, name, value: mapping_node(_nodes.COUNTER, writer.pairs(name, value)),
        lambda reader, node: Counter(dict(_pairs(reader, node))),
    ),
    Kind(_nodes.DEFAULTDICT, defaultdict, _encode_default, _decode_default),
)
_BY_TYPE: dict[type, Kind] = {kind.type: kind for kind in _KINDS if kind.type is not None}
_BY_LABEL: dict[str, Kind] = {kind.label: kind for kind in _KINDS}
