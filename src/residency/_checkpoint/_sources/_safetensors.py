"""Safetensors: one file, or a directory of files with or without an index.

A header is trusted in nothing: what it says is checked against the file's size, its own shapes and
its neighbours, as the format demands (no holes, no overlaps, nothing behind the last tensor).
Shards are recognised by the offsets that torch's `HuggingFaceStorageWriter` puts into headers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from residency._checkpoint._sources._stored import (
    Source,
    Stored,
    TensorName,
    check_cover,
    without_copies,
)
from residency._errors import CorruptSaveError, RefusedError

MAX_HEADER_BYTES = 100_000_000  # what the reference implementation takes at the most
SHARDS_KEY = "DCP_SHARDING_INFO"
INDEX_SUFFIX = ".safetensors.index.json"
SUFFIX = ".safetensors"

# Name in a header -> name in torch, and elements of the header per element of torch.
_TORCH_NAMES = {
    "BF16": "bfloat16",
    "BOOL": "bool",
    "C64": "complex64",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "I8": "int8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "U8": "uint8",
}
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, t) for name, t in _TORCH_NAMES.items()}
_HALF_BYTES = "F4"  # torch's float4_e2m1fn_x2 has two of its elements in one
_WITHOUT_TORCH = {"F6_E2M3", "F6_E3M2"}


@dataclass(frozen=True, slots=True)
class _Header:
    file: Path
    entries: dict[str, Stored]
    has_shards: bool  # its offsets are said, so that other files may have the rest


def open_file(path: Path) -> Source:
    """Opens one safetensors file.

    Raises:
        CorruptSaveError: It is cut off, its header does not fit it, or shards are missing.
        RefusedError: It has a dtype that torch lacks.
    """
    return _source(path, [read_header(path)])


def open_directory(path: Path, files: Sequence[Path]) -> Source:
    """Opens a directory of safetensors files, by its index where it has one.

    Args:
        path: The directory.
        files: What is in it.

    Raises:
        CorruptSaveError: The index and the files differ, shards are missing, or a file is damaged.
        RefusedError: Files have a tensor in common, or an index names a file elsewhere.
    """
    indexes = [file for file in files if file.name.endswith(INDEX_SUFFIX)]
    if len(indexes) > 1:
        indexes = [file for file in indexes if file.name == "model" + INDEX_SUFFIX] or indexes
    if len(indexes) > 1:
        names = ", ".join(sorted(file.name for file in indexes))
        raise RefusedError(f"{path} has several indexes ({names}). Open one of them by its path.")
    if indexes:
        return open_index(indexes[0])
    return _source(path, [read_header(file) for file in files if file.name.endswith(SUFFIX)])


def open_index(path: Path) -> Source:
    """Opens the tensors that an index names, in the files where it says they are.

    Raises:
        CorruptSaveError: It is no index, a file is not there, or does not have a tensor.
        RefusedError: It names a file outside of its directory.
    """
    weight_map = _weight_map(path)
    named: dict[str, list[str]] = {}
    for name, file_name in weight_map.items():
        named.setdefault(file_name, []).append(name)
    headers = []
    for file_name in sorted(named):
        header = read_header(member(path.parent, file_name, path))
        for name in named[file_name]:
            if name not in header.entries:
                raise CorruptSaveError(
                    f"{path} says that {name!r} is in {file_name!r}, which does not have it.",
                    file=file_name,
                    tensor=name,
                )
        # The index names one file of a tensor's shards; each has its own.
        kept = {
            name: stored
            for name, stored in header.entries.items()
            if weight_map.get(name) == file_name or (header.has_shards and name in weight_map)
        }
        headers.append(_Header(header.file, kept, header.has_shards))
    return _source(path, headers)


def read_header(path: Path) -> _Header:
    """Reads and checks the header of a file.

    Raises:
        CorruptSaveError: It is cut off, or its header does not fit it.
        RefusedError: It has a dtype that torch lacks.
    """
    num_bytes = path.stat().st_size
    with path.open("rb") as stream:
        prefix = stream.read(8)
        header_bytes = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or header_bytes > min(MAX_HEADER_BYTES, num_bytes - 8):
            _corrupt(
                path, f"has {num_bytes} bytes and says that {header_bytes} of them are its header"
            )
        text = stream.read(header_bytes)
    try:
        header = json.loads(text, object_pairs_hook=_without_repetition)
        metadata = header.pop("__metadata__", None) or {}
        if not isinstance(metadata, dict):
            raise TypeError(f"its metadata is {metadata!r}")
        shards = json.loads(metadata[SHARDS_KEY]) if SHARDS_KEY in metadata else None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptSaveError(
            f"{path} has a header that is none of safetensors: {error}.", file=path.name
        ) from error
    data_start = 8 + header_bytes
    entries = {}
    end = 0
    for name, spans in sorted(header.items(), key=lambda item: _begin(path, *item)):
        entries[name], begin, next_end = _entry(path, name, spans, shards, data_start)
        if begin != end:
            _corrupt(
                path, f"has {name!r} at {begin}, and what is before it ends at {end}", name, begin
            )
        end = next_end
        if data_start + end > num_bytes:
            found = (
                f"ends at byte {num_bytes}, inside of {name!r}, which goes to {data_start + end}"
            )
            _corrupt(path, found, name, num_bytes)
    if data_start + end != num_bytes:
        behind = num_bytes - data_start - end
        _corrupt(path, f"has {behind} bytes behind its last tensor", offset=data_start + end)
    return _Header(path, entries, shards is not None)


def member(folder: Path, name: object, said_by: Path) -> Path:
    """Returns the path of a file that another one names.

    Raises:
        CorruptSaveError: It is not there, or the name is none.
        RefusedError: It is not within the folder.
    """
    if not isinstance(name, str) or not name or "\0" in name:
        raise CorruptSaveError(f"{said_by} has {name!r} for a file's name.", file=said_by.name)
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise RefusedError(f"{said_by} names {name!r}, which is outside of {folder}.")
    if not (folder / name).is_file():
        raise CorruptSaveError(f"{said_by} names {name!r}, which is not there.", file=name)
    return folder / name


def _source(path: Path, headers: Sequence[_Header]) -> Source:
    found: dict[str, list[tuple[_Header, Stored]]] = {}
    for header in headers:
        for name, stored in header.entries.items():
            found.setdefault(name, []).append((header, stored))
    tensors = {}
    for name, places in found.items():
        strangers = [header.file.name for header, _ in places if not header.has_shards]
        if len(places) > 1 and strangers:
            files = ", ".join(sorted(header.file.name for header, _ in places))
            raise RefusedError(
                f"{path} has {name!r} in several files ({files}), and no index says which one"
                " counts. Open one of them by its path."
            )
        tensors[name] = _together(path, name, [stored for _, stored in places])
    return Source(path, "safetensors", tensors, {name: TensorName(name) for name in tensors})


def _together(path: Path, name: str, shards: Sequence[Stored]) -> list[Stored]:
    """Gives shards the shape of their whole, which is as far as the farthest of them goes."""
    if len({len(shard.shape) for shard in shards}) > 1:
        _corrupt(path, f"has shards of {name!r} with different numbers of dimensions", name)
    ends = [[o + n for o, n in zip(s.offsets, s.shape, strict=True)] for s in shards]
    whole = tuple(max(sizes) for sizes in zip(*ends, strict=True))
    shards = [replace(shard, whole_shape=whole) for shard in without_copies(shards)]
    check_cover(name, shards, path)
    return shards


def _entry(
    path: Path, name: str, entry: Any, shards: Any, data_start: int
) -> tuple[Stored, int, int]:
    """Returns what a header says of one tensor, with where its bytes begin and end in the data."""
    dtype_name, shape = entry.get("dtype"), _sizes(entry.get("shape"))
    begin, end = entry["data_offsets"]
    if shape is None:
        _corrupt(path, f"has the shape {entry.get('shape')!r} for {name!r}", name)
    dtype = _dtype(path, name, dtype_name)
    if dtype_name == _HALF_BYTES:
        if not shape or shape[-1] % 2:
            _corrupt(path, f"has {name!r} with an odd number of half bytes in a row: {shape}", name)
        shape = (*shape[:-1], shape[-1] // 2)
    num_bytes = math.prod(shape) * dtype.itemsize
    if end - begin != num_bytes:
        problem = (
            f"gives {name!r} {end - begin} bytes, where {dtype} of shape {shape} has {num_bytes}"
        )
        _corrupt(path, problem, name, data_start + begin)
    offsets = (0,) * len(shape)
    if shards is not None:
        said = shards.get(name) if isinstance(shards, dict) else None
        found = _sizes(said.get("saved_offsets")) if isinstance(said, dict) else None
        if found is None or len(found) != len(shape):
            _corrupt(path, f"has {said!r} for the offsets of {name!r}", name)
        offsets = found
    stored = Stored(name, dtype, shape, shape, offsets, path, data_start + begin, num_bytes)
    return stored, begin, end


def _begin(path: Path, name: str, entry: Any) -> tuple[int, int]:
    """Returns the data offsets of an entry, to sort by."""
    found = _sizes(entry.get("data_offsets")) if isinstance(entry, dict) else None
    if found is None or len(found) != 2 or found[0] > found[1]:
        _corrupt(path, f"says of {name!r} {entry!r}", name)
    return found[0], found[1]


def _sizes(value: Any) -> tuple[int, ...] | None:
    """Returns a list of natural numbers as a tuple, and None for anything else."""
    if isinstance(value, list) and all(type(size) is int and size >= 0 for size in value):
        return tuple(value)
    return None


def _dtype(path: Path, name: str, dtype_name: Any) -> torch.dtype:
    if dtype_name == _HALF_BYTES:
        return torch.float4_e2m1fn_x2
    if dtype_name in _WITHOUT_TORCH:
        raise RefusedError(f"{name!r} in {path} is {dtype_name}, for which torch has no dtype.")
    if not isinstance(dtype_name, str) or dtype_name not in DTYPES:
        _corrupt(
            path, f"says that {name!r} is {dtype_name!r}, which is no dtype of the format", name
        )
    return DTYPES[dtype_name]


def _weight_map(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_bytes(), object_pairs_hook=_without_repetition)[
            "weight_map"
        ]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptSaveError(
            f"{path} is no index of safetensors files: {error!r}.", file=path.name
        ) from error
    if not isinstance(weight_map, dict):
        _corrupt(path, f"has {weight_map!r} for a weight map")
    for name in weight_map.values():
        member(path.parent, name, path)
    return weight_map


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{repeated!r} stands there twice")
    return entries


def _corrupt(
    path: Path, problem: str, tensor: str | None = None, offset: int | None = None
) -> NoReturn:
    raise CorruptSaveError(f"{path} {problem}.", file=path.name, tensor=tensor, offset=offset)
