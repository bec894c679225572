"""Our own saves as a restore sees them: for every name, where its bytes are and how they lie.

A rank of a run with another number of ranks takes its shards from whatever ranks wrote them, and
plain values from one of those ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from residency._checkpoint._blocks import STORED_DTYPES
from residency._checkpoint._disk._manifest import FileRecord, StoredEntry
from residency._checkpoint._disk._read import Checksums
from residency._checkpoint._sources._stored import Stored, without_copies
from residency._errors import CorruptSaveError

_DTYPES = {name: dtype for dtype, name in STORED_DTYPES.items()}
_RANK = re.compile(r"-rank-(\d{5,})-of-\d{5,}\.safetensors$")


class StoredSave(Protocol):
    """Is what the disk layer knows of a published save."""

    @property
    def folder(self) -> Path: ...
    @property
    def documents(self) -> Sequence[dict[str, Any]]: ...
    @property
    def entries(self) -> Mapping[str, Sequence[StoredEntry]]: ...
    @property
    def files(self) -> Mapping[str, FileRecord]: ...


@dataclass(frozen=True, slots=True)
class View:
    """Says that a tensor's bytes are those of another one.

    Attributes:
        of: The other's name.
        start: The first byte in it.
        dtype: The view's.
        shape: The view's.
        stride: In elements of the view.
    """

    of: str
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Saved:
    """Is a save that can be restored.

    Attributes:
        folder: The save's directory.
        tree: The structure of the state, as nodes.
        tensors: By name, where each is; several places are shards.
        views: Tensors that share their bytes with another.
        checksums: Of each file.
        is_own_rank: Whether the tree was saved by this very rank of as many ranks.
    """

    folder: Path
    tree: Any
    tensors: Mapping[str, Sequence[Stored]]
    views: Mapping[str, View]
    checksums: Mapping[Path, Checksums]
    is_own_rank: bool


def saved_for_rank(save: StoredSave, *, rank: int = 0, world_size: int = 1) -> Saved:
    """Describes a save as one rank restores it.

    Args:
        save: What the disk layer opened and checked.
        rank: This process's.
        world_size: How many ranks restore; another number may have saved.

    Raises:
        CorruptSaveError: The document names bytes that the files do not have.
    """
    num_saved = len(save.documents)
    source_rank = rank if rank < num_saved else 0
    shards: dict[str, list[Stored]] = {}
    whole: dict[str, dict[int, Stored]] = {}
    views: dict[str, View] = {}
    for index, document in enumerate(save.documents):
        notes = document.get("tensors", {})
        own = _entries_of_rank(save, index, num_saved)
        for name in dict.fromkeys((*own, *notes)):
            stored = _stored(save.folder, name, own, notes.get(name, {}))
            if stored is None:
                continue
            if "whole_shape" in notes.get(name, {}):
                shards.setdefault(name, []).append(stored)
            else:
                whole.setdefault(name, {})[index] = stored
        if index == source_rank:
            views = {name: _view(note) for name, note in notes.items() if "of" in note}
    notes = save.documents[source_rank].get("tensors", {})
    tensors: dict[str, Sequence[Stored]] = {n: without_copies(s) for n, s in shards.items()}
    for name, by_rank in whole.items():
        preferred = (source_rank, notes.get(name, {}).get("of_rank"), min(by_rank))
        chosen = next(r for r in preferred if r in by_rank)
        tensors.setdefault(name, [by_rank[chosen]])
    return Saved(
        folder=save.folder,
        tree=save.documents[source_rank]["tree"],
        tensors=tensors,
        views=views,
        checksums={
            save.folder / name: Checksums(record.num_bytes, record.chunk_bytes, record.crc32)
            for name, record in save.files.items()
        },
        is_own_rank=num_saved == world_size,
    )


def _entries_of_rank(save: StoredSave, rank: int, num_ranks: int) -> dict[str, StoredEntry]:
    found: dict[str, StoredEntry] = {}
    for name, entries in save.entries.items():
        for entry in entries:
            match = _RANK.search(entry.file) if num_ranks > 1 else None
            if (int(match[1]) if match else 0) == rank:
                found[name] = entry
    return found


def _stored(
    folder: Path, name: str, entries: Mapping[str, StoredEntry], note: Mapping[str, Any]
) -> Stored | None:
    """Returns where a tensor's bytes are; None where this rank has none of them."""
    of = note.get("of", name)
    entry = entries.get(of)
    if entry is None:
        if "of" in note and "of_rank" not in note:
            raise CorruptSaveError(
                f"{folder.name} says that {name} shares the bytes of {of}, which is in no file.",
                tensor=name,
            )
        return None
    record = entry.record
    is_described = "dtype" in note
    dtype = _dtype_of(note["dtype"]) if is_described else _DTYPES.get(record.dtype)
    if dtype is None:
        raise CorruptSaveError(
            f"{name} has the dtype {record.dtype!r}, which no save has.", tensor=name
        )
    shape = tuple(note["shape"]) if is_described else record.shape
    whole_shape = tuple(note.get("whole_shape") or shape) if "whole_shape" in note else shape
    offsets = note.get("offsets") or record.offsets or (0,) * len(shape)
    stored = Stored(
        name,
        dtype,
        shape,
        whole_shape,
        tuple(offsets),
        folder / entry.file,
        entry.start,
        math.prod(shape) * dtype.itemsize,
    )
    if "of" in note:
        start = entry.start + note["start"]
        return replace(stored, start=start, stride=tuple(note["stride"]))
    return stored


def _view(note: Mapping[str, Any]) -> View:
    return View(
        note["of"],
        note["start"],
        _dtype_of(note["dtype"]),
        tuple(note["shape"]),
        tuple(note["stride"]),
    )


def _dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CorruptSaveError(f"the save names a dtype {name!r}, which this torch does not have.")
    return found
