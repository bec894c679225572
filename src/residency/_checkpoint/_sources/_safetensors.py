"""Safetensors: one file, or a directory of files with or without an index.

Headers are parsed as strictly as those of our own saves. Shards are recognised by the offsets that
torch's `HuggingFaceStorageWriter` puts into them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from residency._checkpoint._disk._header import header_length, parse_header
from residency._checkpoint._disk._manifest import StoredEntry, parse_json
from residency._checkpoint._document._dtypes import DTYPES, HALF_BYTES
from residency._checkpoint._sources._source import (
    Source,
    StoredTensor,
    TensorName,
    check_cover,
    without_copies,
)
from residency._errors import CorruptSaveError, RefusedError, in_short

INDEX_SUFFIX = ".safetensors.index.json"
SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class _Header:
    file: Path
    entries: dict[str, StoredTensor]
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
        listed = {
            name: stored
            for name, stored in header.entries.items()
            if weight_map.get(name) == file_name or (header.has_shards and name in weight_map)
        }
        headers.append(_Header(header.file, listed, header.has_shards))
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
        header = prefix + stream.read(header_length(prefix, num_bytes, file=path.name) - 8)
    entries = {}
    has_shards = False
    for entry in parse_header(header, num_bytes, file=path.name):
        has_shards = has_shards or entry.offsets is not None
        entries[entry.name] = stored_at(path, entry)
    return _Header(path, entries, has_shards)


def stored_at(path: Path, entry: StoredEntry) -> StoredTensor:
    """Describes what a header says is in a file, as a whole tensor or a shard of that shape.

    Raises:
        CorruptSaveError: The entry contradicts itself.
        RefusedError: It has a dtype that torch lacks.
    """
    dtype, shape = DTYPES.get(entry.dtype), entry.shape
    if dtype is None:
        raise RefusedError(
            f"{in_short(entry.name)!r} in {path} is {entry.dtype}, for which torch has no dtype."
        )
    if entry.dtype == HALF_BYTES:
        if not shape or shape[-1] % 2:
            _corrupt(path, f"has {entry.name!r} with half a byte in a row: {shape}", entry.name)
        shape = (*shape[:-1], shape[-1] // 2)
    offsets = entry.offsets or (0,) * len(shape)
    span = path, entry.start, entry.num_bytes
    return StoredTensor(entry.name, dtype, shape, shape, offsets, *span)


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
    found: dict[str, list[tuple[_Header, StoredTensor]]] = {}
    for header in headers:
        for name, stored in header.entries.items():
            found.setdefault(name, []).append((header, stored))
    tensors = {}
    for name, shards in found.items():
        strangers = [header.file.name for header, _ in shards if not header.has_shards]
        if len(shards) > 1 and strangers:
            files = ", ".join(sorted(header.file.name for header, _ in shards))
            raise RefusedError(
                f"{path} has {name!r} in several files ({files}), and no index says which one"
                " counts. Open one of them by its path."
            )
        tensors[name] = _together(path, name, [stored for _, stored in shards])
    return Source(path, "safetensors", tensors, {name: TensorName(name) for name in tensors})


def _together(path: Path, name: str, shards: Sequence[StoredTensor]) -> list[StoredTensor]:
    """Gives shards the shape of their whole, which is as far as the farthest of them goes."""
    if len({len(shard.shape) for shard in shards}) > 1:
        _corrupt(path, f"has shards of {name!r} with different numbers of dimensions", name)
    ends = [[o + n for o, n in zip(s.offsets, s.shape, strict=True)] for s in shards]
    whole = tuple(max(sizes) for sizes in zip(*ends, strict=True))
    shards = [shard._replace(whole_shape=whole) for shard in without_copies(shards)]
    check_cover(name, shards, path)
    return shards


def _weight_map(path: Path) -> dict[str, str]:
    try:
        weight_map = parse_json(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptSaveError(
            f"{path} is no index of safetensors files: {error!r}.", file=path.name
        ) from error
    if not isinstance(weight_map, dict):
        _corrupt(path, f"has {weight_map!r} for a weight map")
    for name in weight_map.values():
        member(path.parent, name, path)
    return weight_map


def _corrupt(path: Path, problem: str, tensor: str | None = None) -> NoReturn:
    raise CorruptSaveError(f"{path} {problem}.", file=path.name, tensor=tensor)
