"""Opens a published save: reads its manifest and its headers, and checks all of them before any
tensor is read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from residency._checkpoint._disk._crc import crc32
from residency._checkpoint._disk._header import parse_header
from residency._checkpoint._disk._manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    StoredEntry,
    parse_manifest,
)
from residency._checkpoint._disk._naming import unreadable
from residency._checkpoint._disk._system import SYSTEM, System, close_quietly, read_bytes, read_file
from residency._errors import CorruptSaveError


@dataclass(frozen=True, slots=True)
class StoredSave:
    """The parts that a save is made of.

    Attributes:
        step: The training step.
        folder: Its directory.
        documents: Each rank's state without the bytes of its tensors, as JSON, by rank.
        entries: Where each tensor's bytes are, by its name: one entry, or one per shard.
        files: What the manifest says of each file, by its name.
        rank_of_file: Which rank wrote each file.
        metrics: The figures that were saved with it.
    """

    step: int
    folder: Path
    documents: Sequence[dict[str, Any]]
    entries: Mapping[str, Sequence[StoredEntry]]
    files: Mapping[str, FileRecord]
    rank_of_file: Mapping[str, int]
    metrics: Mapping[str, float]


def read_manifest(folder: Path, step: int | None = None, *, system: System = SYSTEM) -> Manifest:
    """Returns the manifest of a save, whatever the name of its folder.

    Args:
        folder: The save's directory.
        step: The step that is expected; None for any.
        system: Makes the system calls.

    Raises:
        CorruptSaveError: It is damaged, or that of another step.
        CheckpointError: It cannot be read.
    """
    try:
        data = read_file(system, folder / MANIFEST)
    except FileNotFoundError:
        _fail(MANIFEST, f"{folder} has no {MANIFEST}")
    except OSError as error:
        raise unreadable(folder / MANIFEST, error) from error
    manifest = parse_manifest(data)
    if step is not None and manifest.step != step:
        _fail(MANIFEST, f"{folder} holds step {manifest.step}, expected step {step}")
    return manifest


def open_save(folder: Path, step: int | None = None, *, system: System = SYSTEM) -> StoredSave:
    """Returns what the save in a folder is made of; there is no other way to open one.

    Args:
        folder: The save's directory.
        step: The step that is expected; None for any.
        system: Makes the system calls.

    Raises:
        CorruptSaveError: The manifest, the size of a file or a header is not as it was written.
        CheckpointError: A file cannot be read.
    """
    manifest = read_manifest(folder, step, system=system)
    files = {name: record for rank in manifest.ranks for name, record in rank.files.items()}
    entries: dict[str, list[StoredEntry]] = {}
    for name, record in files.items():
        for entry in read_header(folder, name, record, system=system):
            entries.setdefault(entry.name, []).append(entry)
    return StoredSave(
        step=manifest.step,
        folder=folder,
        documents=[rank.document for rank in manifest.ranks],
        entries=entries,
        files=files,
        rank_of_file={n: index for index, rank in enumerate(manifest.ranks) for n in rank.files},
        metrics=manifest.metrics,
    )


def read_header(
    folder: Path, name: str, record: FileRecord, *, system: System = SYSTEM
) -> list[StoredEntry]:
    """Returns what a file of a save holds, in the order of its bytes.

    Raises:
        CorruptSaveError: Its size or its header is not as it was written.
        CheckpointError: It cannot be read.
    """
    try:
        fd = system.open(folder / name, os.O_RDONLY)
        try:
            num_bytes = system.fstat(fd).st_size
            # Of a file of another size nothing is read: a manifest can claim any size.
            is_whole = num_bytes == record.num_bytes
            header = read_bytes(system, fd, record.header_bytes, 0) if is_whole else b""
        finally:
            close_quietly(system, fd)
    except FileNotFoundError:
        _fail(name, f"{name} is missing from {folder}")
    except OSError as error:
        raise unreadable(folder / name, error) from error
    if num_bytes != record.num_bytes:
        what = "truncated" if num_bytes < record.num_bytes else "too long"
        _fail(
            name,
            f"{name} is {what}: it has {num_bytes} bytes, and had {record.num_bytes} when written",
            min(num_bytes, record.num_bytes),
        )
    if crc32(header) != record.header_crc32:
        _fail(name, f"the header of {name} is not as it was written", 0)
    return parse_header(header, num_bytes, file=name)


def _fail(file: str, reason: str, offset: int | None = None) -> NoReturn:
    raise CorruptSaveError(f"{reason}.", file=file, offset=offset)
