"""Saves of this library: for every name, where its bytes are and how they lie.

This is the one reader of the format above the files themselves; restores, ``load_into`` and torch's
distributed checkpoints see a save through it. A rank of a run with another number of ranks takes
its shards from whatever ranks wrote them, and plain values from one of those ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from residency._checkpoint._disk._manifest import MANIFEST, StoredEntry
from residency._checkpoint._disk._naming import damage_named, unreadable
from residency._checkpoint._disk._open_save import StoredSave, open_save
from residency._checkpoint._disk._published import newest_save
from residency._checkpoint._disk._wanted import Checksums
from residency._checkpoint._document._decode import tensor_names
from residency._checkpoint._document._nodes import read_document
from residency._checkpoint._document._notes import PLAIN, TensorNote, read_note, senseless
from residency._checkpoint._sources._safetensors import stored_at
from residency._checkpoint._sources._source import Source, StoredTensor, check_cover, without_copies
from residency._errors import CorruptSaveError, RefusedError


def find_save(path: Path) -> Path | None:
    """Returns the save that a path means: a save's directory, its manifest, or the newest save of a
    directory of saves; None where there is none.

    Raises:
        CheckpointError: The path cannot be looked at.
    """
    try:
        if path.name == MANIFEST and path.is_file():
            return path.parent
        return path if (path / MANIFEST).is_file() else newest_save(path)
    except OSError as error:
        raise unreadable(path, error) from error


def open_source(folder: Path) -> Source:
    """Opens a published save as a source, with the values of its first rank and what others alone
    have.

    Raises:
        CorruptSaveError: The manifest, the files and the documents do not fit each other.
    """
    with damage_named(folder, file=MANIFEST):
        return saved_for_rank(open_save(folder), world_size=0)


def saved_for_rank(save: StoredSave, *, rank: int = 0, world_size: int = 1) -> Source:
    """Describes a save as one rank restores it.

    Args:
        save: What the disk layer opened and checked.
        rank: This process's.
        world_size: How many ranks restore; another number may have saved. What that rank does not
            have comes from the lowest that has it then.

    Raises:
        CorruptSaveError: A document makes no sense, or names bytes that the files do not have.
    """
    num_saved = len(save.documents)
    source_rank = rank if rank < num_saved else 0
    trees = {source_rank: read_document(save.documents[source_rank])}
    if num_saved != world_size:
        trees |= {r: read_document(save.documents[r]) for r in range(num_saved) if r not in trees}
    rank_of = {key: r for r in reversed(trees) for key in trees[r]}
    tree = {key: trees[r][key] for key, r in rank_of.items()}
    notes = [_notes(document) for document in save.documents]
    shards: dict[str, dict[int, list[StoredTensor]]] = {}
    whole: dict[str, dict[int, StoredTensor]] = {}
    tensors: dict[str, Sequence[StoredTensor]] = {}
    for index, name, stored in _located(save, notes):
        note = notes[index].get(name, PLAIN)
        if note.whole_shape is not None:
            shards.setdefault(name, {}).setdefault(note.mesh, []).append(stored)
        elif num_saved == 1:
            tensors[name] = [stored]
        else:
            whole.setdefault(name, {})[index] = stored
    for name, of_meshes in shards.items():
        mine = next((each[name].mesh for each in (notes[source_rank], *notes) if name in each), 0)
        tensors[name] = without_copies(of_meshes[mine if mine in of_meshes else min(of_meshes)])
        check_cover(name, tensors[name], save.folder)
    for name, by_rank in whole.items():
        writer = notes[source_rank].get(name, PLAIN).of_rank
        chosen = next(r for r in (source_rank, writer, min(by_rank)) if r in by_rank)
        tensors.setdefault(name, [by_rank[chosen]])
    views: dict[str, TensorNote] = {}
    for key, node in tree.items():
        notes_here = notes[rank_of[key]]
        for name in tensor_names(node):
            if name not in tensors:
                raise CorruptSaveError(
                    f"{save.folder} has no bytes for {name!r}, which its document names.",
                    tensor=name,
                )
            if (note := notes_here.get(name, PLAIN)).of is not None:
                views[name] = note
    checksums = {
        save.folder / name: Checksums(record.num_bytes, record.chunk_bytes, record.crc32)
        for name, record in save.files.items()
    }
    is_own_rank = num_saved == world_size
    return Source(save.folder, "residency", tensors, tree, views, checksums, is_own_rank)


def check_whole(save: StoredSave) -> None:
    """Asks of what the ranks wrote, before it is published, what a restore will ask of it.

    Raises:
        RefusedError: A tensor that one rank leaves to another is in no file, or the shards of one
            do not cover it.
    """
    notes = [_notes(document) for document in save.documents]
    written: list[set[str]] = [set() for _ in notes]
    for rank, name, _ in _located(save, notes):
        written[rank].add(name)
    for rank, of_rank in enumerate(notes):
        for name, note in of_rank.items():
            writer = note.of_rank
            if writer is not None and name not in written[writer] and not note.is_empty_shard:
                raise RefusedError(
                    f"{name} of rank {rank} is taken to be alike on all ranks, as with "
                    f"DistributedDataParallel, and rank {writer} has none. Nothing was "
                    "saved; give each rank the same state, or give module.module, which each rank "
                    "saves for itself."
                )
    for rank in sorted({0, *(note.mesh for of_rank in notes for note in of_rank.values())}):
        try:
            saved_for_rank(save, rank=rank, world_size=len(notes))
        except CorruptSaveError as error:
            raise RefusedError(
                f"the ranks' states make no save: {error} Nothing was saved; a sharded tensor has "
                "to be in the state of each rank that has a part of it."
            ) from error


def _notes(document: Mapping[str, object]) -> dict[str, TensorNote]:
    found = document.get("tensors", {})
    if not isinstance(found, dict):
        raise senseless("tensors", found)
    return {name: read_note(name, note) for name, note in found.items()}


def _located(
    save: StoredSave, notes: Sequence[Mapping[str, TensorNote]]
) -> Iterator[tuple[int, str, StoredTensor]]:
    """Yields where the tensors of each rank are, as its document says that they are to be read."""
    by_rank: list[dict[str, list[StoredEntry]]] = [{} for _ in notes]
    paths = {file: save.folder / file for file in save.rank_of_file}
    for name, entries in save.entries.items():
        for entry in entries:
            by_rank[save.rank_of_file[entry.file]].setdefault(name, []).append(entry)
    for rank, (entries_here, notes_here) in enumerate(zip(by_rank, notes, strict=True)):
        for name in dict.fromkeys((*entries_here, *notes_here)):
            note = notes_here.get(name, PLAIN)
            if note.of is not None and notes_here.get(note.of, PLAIN).of is not None:
                raise senseless(name, note)  # what a view lies in is stored, and no view itself
            if note.of_rank is not None:
                continue
            found = entries_here.get(note.of or name, [])
            if not found and not note.is_empty_shard:
                raise CorruptSaveError(
                    f"{save.folder} has no bytes for {name!r}, although its document names it.",
                    tensor=name,
                )
            for entry in found:
                yield rank, name, _stored(paths[entry.file], name, entry, note)


def _stored(path: Path, name: str, entry: StoredEntry, note: TensorNote) -> StoredTensor:
    stored = stored_at(path, entry)
    if stored.name != name:
        stored = stored._replace(name=name)
    if note.dtype is not None:
        stored = _as_noted(stored, entry.num_bytes, note)
    if note.whole_shape is None:
        if not any(stored.offsets):
            return stored  # it is whole already, as nearly always
        return stored._replace(whole_shape=stored.shape, offsets=(0,) * len(stored.shape))
    # The header has the offsets, but for what is stored as bytes.
    offsets = entry.offsets if note.dtype is None and entry.offsets else note.offsets
    if offsets is None or not len(offsets) == len(stored.shape) == len(note.whole_shape):
        raise senseless(name, note)
    return stored._replace(whole_shape=note.whole_shape, offsets=offsets)


def _as_noted(stored: StoredTensor, num_bytes: int, note: TensorNote) -> StoredTensor:
    """Gives a tensor that is stored as bytes, or as a view of others, its own dtype and shape."""
    assert note.dtype is not None
    zeros = (0,) * len(note.shape)
    whole_bytes = math.prod(note.shape) * note.dtype.itemsize
    if note.of is None:
        if whole_bytes != num_bytes:
            raise senseless(stored.name, note)
        span = stored.file, stored.start, num_bytes
        return StoredTensor(stored.name, note.dtype, note.shape, note.shape, zeros, *span)
    if note.start + note.span_bytes > num_bytes:
        raise senseless(stored.name, note)
    is_in_order = note.span_bytes == whole_bytes and _row_major(note.shape, note.stride)
    span = stored.file, stored.start + note.start, note.span_bytes
    stride = None if is_in_order else note.stride
    return StoredTensor(stored.name, note.dtype, note.shape, note.shape, zeros, *span, None, stride)


def _row_major(shape: Sequence[int], stride: Sequence[int]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= max(size, 1)
    return True
