"""Reads a save and compares every byte's checksum with what was written.

Memory: one buffer of 4 MiB on the host.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from residency._checkpoint._disk._crc import crc32
from residency._checkpoint._disk._manifest import MANIFEST, FileRecord, StoredEntry
from residency._checkpoint._disk._publish import CheckpointDirectory
from residency._checkpoint._disk._stored import read_header, read_manifest
from residency._checkpoint._disk._system import SYSTEM, System, close_quietly, read_into
from residency._errors import CheckpointError, CorruptSaveError
from residency._units import MIB

_BUFFER_BYTES = 4 * MIB


@dataclass(frozen=True, slots=True)
class Damage:
    """Says where a save is not as it was written.

    Attributes:
        file: The file, relative to the save's directory.
        tensors: The tensors that the damaged bytes may belong to: a checksum is that of a chunk,
            and several tensors can lie in one.
        offset: Where in the file the damaged chunk begins, or None where that says nothing.
        reason: What was found and what was expected, in words.
    """

    file: str
    tensors: tuple[str, ...]
    offset: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Verification:
    """Holds what was found in one save.

    Attributes:
        step: The training step.
        num_bytes: What was read of its files.
        damages: What is not as it was written; empty for a whole save.
    """

    step: int
    num_bytes: int
    damages: tuple[Damage, ...]

    def raise_if_damaged(self) -> None:
        """Raises CorruptSaveError for the first damage, if there is one."""
        if self.damages:
            first = self.damages[0]
            raise CorruptSaveError(
                first.reason,
                file=first.file,
                tensor=first.tensors[0] if first.tensors else None,
                offset=first.offset,
            )


def verify_save(
    directory: CheckpointDirectory,
    step: int,
    *,
    system: System = SYSTEM,
    on_bytes: Callable[[int], None] | None = None,
) -> Verification:
    """Reads everything that a save holds, and returns what of it is damaged.

    Args:
        directory: Where the save is.
        step: Its step.
        system: Makes the system calls.
        on_bytes: Is called with each number of bytes read.

    Raises:
        CheckpointError: There is no such save.
    """
    folder = directory.folder(step)
    try:
        manifest = read_manifest(folder, step, system=system)
    except CheckpointError as error:
        return Verification(step, 0, (_damage(error, MANIFEST),))
    damages: list[Damage] = []
    num_bytes = 0
    for rank in manifest.ranks:
        for name, record in rank.files.items():
            check = _FileCheck(system, folder, name, record, on_bytes)
            damages += check.damages()
            num_bytes += check.num_bytes
    return Verification(step, num_bytes, tuple(damages))


class _FileCheck:
    """Reads one file of a save."""

    def __init__(
        self,
        system: System,
        folder: Path,
        name: str,
        record: FileRecord,
        on_bytes: Callable[[int], None] | None,
    ) -> None:
        self.num_bytes = 0
        self._system = system
        self._folder = folder
        self._name = name
        self._record = record
        self._on_bytes = on_bytes
        self._buffer = memoryview(bytearray(min(_BUFFER_BYTES, max(record.chunk_bytes, 1))))

    def damages(self) -> Iterator[Damage]:
        """Yields what is not as it was written."""
        entries: Sequence[StoredEntry] = ()
        try:
            entries = read_header(self._folder, self._name, self._record, system=self._system)
        except CheckpointError as error:
            yield _damage(error, self._name)
        try:
            fd = self._system.open(self._folder / self._name, os.O_RDONLY)
        except OSError:
            return  # said already: so was the header's file
        try:
            for index, expected in enumerate(self._record.crc32):
                damage = self._check_chunk(fd, index, expected, entries)
                if damage is not None:
                    yield damage
        finally:
            close_quietly(self._system, fd)

    def _check_chunk(
        self, fd: int, index: int, expected: int, entries: Sequence[StoredEntry]
    ) -> Damage | None:
        offset = start = index * self._record.chunk_bytes
        stop = min(start + self._record.chunk_bytes, self._record.num_bytes)
        reason = ""
        summed = 0
        while offset < stop:
            view = self._buffer[: min(self._buffer.nbytes, stop - offset)]
            try:
                num_bytes = read_into(self._system, fd, view, offset)
            except OSError as error:
                reason = f"cannot be read: {error}"
                break
            summed = crc32(view[:num_bytes], summed)
            offset += num_bytes
            self.num_bytes += num_bytes
            if self._on_bytes is not None:
                self._on_bytes(num_bytes)
            if num_bytes < view.nbytes:
                reason = f"end at {offset}, expected {self._record.num_bytes} bytes"
                break
        if not reason and summed == expected:
            return None
        reason = reason or f"have the checksum {summed:08x}, and had {expected:08x} when written"
        tensors = _tensors_in(entries, start, stop)
        owners = f" ({', '.join(tensors)})" if tensors else ""
        return Damage(
            self._name,
            tensors,
            start,
            f"{self._name}: the bytes {start} to {stop}{owners} {reason}.",
        )


def _tensors_in(entries: Sequence[StoredEntry], start: int, stop: int) -> tuple[str, ...]:
    return tuple(
        entry.record.name
        for entry in entries
        if entry.start < stop and start < entry.start + entry.record.num_bytes
    )


def _damage(error: CheckpointError, file: str) -> Damage:
    """Returns what an error says; of one that names no file, the file is the one being read."""
    if isinstance(error, CorruptSaveError):
        tensors = () if error.tensor is None else (error.tensor,)
        return Damage(error.file or file, tensors, error.offset, str(error))
    return Damage(file, (), None, str(error))
