"""Saves of this library: a published directory, or the newest one of a checkpointer's directory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from residency._checkpoint._disk._manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    Record,
    StoredEntry,
    parse_manifest,
)
from residency._checkpoint._disk._stored import read_header
from residency._checkpoint._sources._safetensors import stored_at
from residency._checkpoint._sources._stored import Source, Stored, check_cover, without_copies
from residency._errors import CorruptSaveError

_PUBLISHED = re.compile(r"step-(\d{8,})")


def newest_save(path: Path) -> Path | None:
    """Returns the newest published save below a directory, or the directory if it is a save."""
    if (path / MANIFEST).is_file():
        return path
    found = [
        (int(m[1]), entry) for entry in path.iterdir() if (m := _PUBLISHED.fullmatch(entry.name))
    ]
    published = [(step, folder) for step, folder in found if (folder / MANIFEST).is_file()]
    return max(published)[1] if published else None


def open_save(folder: Path) -> Source:
    """Opens a published save.

    Its `values` are the tree of the first rank's document, as it is on disk.

    Raises:
        CorruptSaveError: The manifest, the files and the documents do not fit each other.
    """
    manifest = parse_manifest((folder / MANIFEST).read_bytes())
    tensors: dict[str, list[Stored]] = {}
    files: dict[Path, FileRecord] = {}
    for rank in manifest.ranks:
        entries: dict[str, list[StoredEntry]] = {}
        for file_name, record in rank.files.items():
            files[folder / file_name] = record
            for entry in read_header(folder, file_name, record):
                entries.setdefault(entry.record.name, []).append(entry)
        for name, stored in _described(folder, entries, rank.document):
            tensors.setdefault(name, []).append(stored)
    for name, shards in tensors.items():
        tensors[name] = without_copies(shards)
        check_cover(name, tensors[name], folder)
    documents = [rank.document for rank in manifest.ranks]
    return Source(folder, "residency", tensors, _tree(manifest), documents, files)


def _tree(manifest: Manifest) -> Any:
    document = manifest.ranks[0].document
    if "tree" not in document:
        raise CorruptSaveError(f"{MANIFEST} has a document without a tree.", file=MANIFEST)
    return document["tree"]


def _described(
    folder: Path, entries: Mapping[str, list[StoredEntry]], document: Mapping[str, Any]
) -> Iterator[tuple[str, Stored]]:
    """Yields what one rank has, as its document says that it is to be read."""
    notes = document.get("tensors", {})
    for name in dict.fromkeys((*entries, *notes)):
        note = notes.get(name, {})
        if "of_rank" in note:
            continue
        found = entries.get(note.get("of", name), [])
        if not found and note.get("offsets", ()) is not None:
            raise CorruptSaveError(
                f"{folder} has no bytes for {name!r}, of which its document speaks.", tensor=name
            )
        for entry in found:
            try:
                yield name, _stored(folder, name, entry, note)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise CorruptSaveError(
                    f"{folder} has a document that says of {name!r} what makes no sense: {note!r}.",
                    file=MANIFEST,
                    tensor=name,
                ) from error


def _stored(folder: Path, name: str, entry: StoredEntry, note: Mapping[str, Any]) -> Stored:
    record = entry.record
    stored = replace(stored_at(folder / entry.file, record, entry.start), name=name)
    if "dtype" in note:
        stored = _as_noted(stored, record, note)
    if "whole_shape" not in note:
        zeros = (0,) * len(stored.shape)
        return replace(stored, whole_shape=stored.shape, offsets=zeros)
    # The header has the offsets, but for what is stored as bytes.
    offsets = record.offsets if "dtype" not in note and record.offsets else note["offsets"]
    return replace(stored, whole_shape=tuple(note["whole_shape"]), offsets=tuple(offsets))


def _as_noted(stored: Stored, record: Record, note: Mapping[str, Any]) -> Stored:
    """Gives a tensor that is stored as bytes, or as a view of others, its own dtype and shape."""
    dtype, shape = getattr(torch, note["dtype"]), tuple(note["shape"])
    start, stride = note.get("start", 0), tuple(note["stride"]) if "stride" in note else None
    steps = stride or torch.empty(shape, device="meta").stride()
    num_elements = 1 + sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
    num_bytes = num_elements * dtype.itemsize if all(shape) else 0
    if start < 0 or start + num_bytes > record.num_bytes:
        raise ValueError(f"{num_bytes} bytes at {start} of {record.num_bytes}")
    if stride == torch.empty(shape, device="meta").stride():
        stride = None
    zeros = (0,) * len(shape)
    place = stored.file, stored.start + start, num_bytes
    return Stored(stored.name, dtype, shape, shape, zeros, *place, None, stride)
