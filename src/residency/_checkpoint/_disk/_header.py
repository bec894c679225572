"""The headers of safetensors files: made so that the tensors' bytes begin at a page and stock
readers of shards find their offsets, and parsed as strictly as the format can be read.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Collection, Mapping, Sequence
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any, NoReturn

from residency._checkpoint._disk._manifest import Record, StoredEntry, parse_json
from residency._errors import CheckpointError, CorruptSaveError

ALIGNMENT = 4096
"""Where the tensors' bytes begin, and what O_DIRECT asks of addresses, lengths and offsets."""

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit; its library refuses a longer header.

Source: ``MAX_HEADER_SIZE`` in safetensors/src/tensor.rs.
"""

_LENGTH_BYTES = 8
_MOST_DIMENSIONS = 1000
_INTS = frozenset((int,))
_TOO_LARGE = 1 << 128  # the format counts in 64 bits; longer numbers only take time
METADATA = "__metadata__"  # no tensor has this name
_METADATA = {"format": "pt", "residency": "1"}  # of the files of a save
# What torch's HuggingFaceStorageReader looks for.
# Source: CUSTOMMETADATA_KEY and SAVED_OFFSETS_KEY in torch/distributed/checkpoint/_hf_utils.py.
_SHARDING = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"
_LAST_BITS = 1000  # more than an element of any dtype has
# Source: `Dtype` in safetensors/src/tensor.rs, 0.8.
DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}


def layout_order(records: Sequence[Record]) -> list[int]:
    """Returns the order in which a file holds its records, as indices.

    Blocks of whole pages come first, in the order given: each then begins at a page, and needs no
    copy on its way to the disk. The others follow by falling size of their elements, so that each
    is aligned for its dtype.
    """

    def key(index: int) -> int:
        record = records[index]
        is_ragged = record.num_bytes % ALIGNMENT != 0
        return _LAST_BITS - DTYPE_BITS.get(record.dtype, 0) if is_ragged else 0

    return sorted(range(len(records)), key=key)


def make_header(
    records: Sequence[Record],
    *,
    file: str,
    metadata: Mapping[str, str] = _METADATA,
    alignment: int = ALIGNMENT,
) -> bytes:
    """Returns the header of a file that holds these records one behind the other.

    Args:
        records: What it holds.
        file: Its name, for messages.
        metadata: The texts that it has besides; of ours those of a save.
        alignment: The tensors' bytes begin at a multiple of it.

    Raises:
        CheckpointError: Two records have one name, a record contradicts itself, or there are too
            many for the format.
    """
    texts = dict(metadata)
    if any(record.offsets is not None for record in records):
        # The reader wants an entry for every tensor of a file that has one at all.
        sharding = {r.name: {_OFFSETS: r.offsets or (0,) * len(r.shape)} for r in records}
        texts[_SHARDING] = json.dumps(sharding)
    # As text at once: objects for each of many tensors cost more than their encoding.
    shown = f"{_quoted(METADATA)}:{json.dumps(texts, separators=(',', ':'))}"
    fields = [shown] if texts else []
    names = {METADATA}
    start = 0
    for record in records:
        _check_record(record, names, file)
        names.add(record.name)
        stop = start + record.num_bytes
        shape = ",".join(map(str, record.shape))
        fields.append(
            f'{_quoted(record.name)}:{{"dtype":"{record.dtype}","shape":[{shape}],'
            f'"data_offsets":[{start},{stop}]}}'
        )
        start = stop
    text = f"{{{','.join(fields)}}}".encode("ascii")
    num_bytes = -(-(_LENGTH_BYTES + len(text)) // alignment) * alignment - _LENGTH_BYTES
    if num_bytes > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{file} would need a header of {num_bytes} bytes for {len(records)} tensors; the "
            f"format allows {MAX_HEADER_BYTES}. Split the state into more top-level names."
        )
    return num_bytes.to_bytes(_LENGTH_BYTES, "little") + text.ljust(num_bytes)


def _check_record(record: Record, names: Collection[str], file: str) -> None:
    if record.name in names:
        raise CheckpointError(f"{file} would hold two tensors named {record.name!r}.")
    expected = _size_bits(record.dtype, record.shape) if record.dtype in DTYPE_BITS else None
    if expected != record.num_bytes * 8:
        raise CheckpointError(
            f"the tensor {record.name!r} of {file} has {record.num_bytes} bytes, which does not "
            f"agree with the dtype {record.dtype!r} and the shape {list(record.shape)}."
        )
    if record.offsets is not None and len(record.offsets) != len(record.shape):
        raise CheckpointError(
            f"the shard {record.name!r} of {file} has {len(record.offsets)} offsets for "
            f"{len(record.shape)} dimensions."
        )


def header_length(prefix: bytes, file_bytes: int, *, file: str) -> int:
    """Returns where a file's tensors begin, as its first 8 bytes have it.

    Raises:
        CorruptSaveError: The file is no safetensors file, or its end is missing.
    """
    if len(prefix) < _LENGTH_BYTES:
        _fail(file, f"it has {file_bytes} bytes, too few for a header", offset=0)
    num_bytes = int.from_bytes(prefix[:_LENGTH_BYTES], "little")
    if num_bytes > MAX_HEADER_BYTES:
        _fail(file, f"its header claims {num_bytes} bytes, above {MAX_HEADER_BYTES}", offset=0)
    if _LENGTH_BYTES + num_bytes > file_bytes:
        _fail(file, f"its header claims {num_bytes} bytes of {file_bytes}", offset=0)
    return _LENGTH_BYTES + num_bytes


def parse_header(header: bytes, file_bytes: int, *, file: str) -> list[StoredEntry]:
    """Returns what a file holds, in the order of its bytes.

    Args:
        header: The file's bytes up to where the tensors begin, as `header_length` has it.
        file_bytes: The size of the whole file.
        file: The file's name, for entries and messages.

    Raises:
        CorruptSaveError: The header is not that of a safetensors file of this size without holes.
    """
    try:
        fields = parse_json(header[_LENGTH_BYTES:].decode("utf-8"))
    except (ValueError, RecursionError) as error:
        _fail(file, f"its header is not JSON: {error}")
    if not isinstance(fields, dict):
        _fail(file, "its header is no JSON object")
    offsets = _parse_sharding(fields.pop(METADATA, None), file)
    end = len(header)
    found = [_parse_entry(name, fields[name], offsets, file, end) for name in fields]
    found.sort(key=lambda entry: (entry.start, entry.num_bytes))
    for entry in found:
        if entry.start != end:
            what = "overlap others" if entry.start < end else "leave a hole before them"
            _fail(file, f"the bytes of {entry.name!r} {what}", entry.name)
        end += entry.num_bytes
    if end != file_bytes:
        what = "truncated" if file_bytes < end else "too long"
        _fail(file, f"it is {what}: {file_bytes} bytes, expected {end}")
    return found


def _parse_entry(
    name: str, fields: object, offsets: dict[str, tuple[int, ...]], file: str, first: int
) -> StoredEntry:
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        _fail(file, f"the entry {name!r} is not a dtype, a shape and two offsets", name)
    dtype, shape, data = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        _fail(file, f"the dtype of {name!r} is {dtype!r}, which the format does not know", name)
    if not _is_counts(shape) or len(shape) > _MOST_DIMENSIONS:
        _fail(file, f"the shape of {name!r} is {reprlib.repr(shape)}", name)
    if not _is_counts(data) or len(data) != 2 or data[0] > data[1]:
        _fail(file, f"the offsets of {name!r} are {reprlib.repr(data)}", name)
    num_bytes = data[1] - data[0]
    if _size_bits(dtype, shape) != num_bytes * 8:
        _fail(file, f"{name!r} has {num_bytes} bytes for {dtype} of the shape {list(shape)}", name)
    begin = offsets.get(name)
    if begin is not None and len(begin) != len(shape):
        _fail(file, f"the shard {name!r} of the shape {list(shape)} begins at {list(begin)}", name)
    return StoredEntry(name, dtype, shape, num_bytes, begin, file, first + data[0])


def _parse_sharding(metadata: object, file: str) -> dict[str, tuple[int, ...]]:
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        _fail(file, "its metadata is no object of strings")
    if _SHARDING not in metadata:
        return {}
    try:
        found = parse_json(metadata[_SHARDING])
        begins = {name: fields[_OFFSETS] for name, fields in found.items()}
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        _fail(file, f"its {_SHARDING} is not readable: {error!r}")
    for name, begin in begins.items():
        if not _is_counts(begin):
            _fail(file, f"the shard {name!r} begins at {reprlib.repr(begin)}", name)
    return begins


def _is_counts(values: Any) -> bool:
    if not isinstance(values, tuple) or not _INTS.issuperset(map(type, values)):
        return False
    return not values or (min(values) >= 0 and max(values) < _TOO_LARGE)


def _size_bits(dtype: str, shape: Sequence[int]) -> int:
    return math.prod(shape) * DTYPE_BITS[dtype]


def _fail(
    file: str, reason: str, tensor: str | None = None, *, offset: int | None = None
) -> NoReturn:
    raise CorruptSaveError(f"{file} is damaged: {reason}.", file=file, tensor=tensor, offset=offset)
