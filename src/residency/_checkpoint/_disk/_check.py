"""Reads the files of a save and compares every chunk's checksum with what was written.

A save that is about to be published can be read back past the page cache: with O_DIRECT where the
file system takes it, else after the cache was asked to drop the file's pages.

Memory: one buffer of 4 MiB on the host.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from residency._checkpoint._disk._crc import crc32
from residency._checkpoint._disk._descriptor import Descriptor
from residency._checkpoint._disk._header import ALIGNMENT
from residency._checkpoint._disk._manifest import FileRecord, StoredEntry
from residency._checkpoint._disk._naming import damage_named
from residency._checkpoint._disk._open_save import read_header
from residency._checkpoint._disk._system import O_DIRECT, UNSUPPORTED, System, close_quietly
from residency._errors import CheckpointError, CorruptSaveError
from residency._units import MIB

_BUFFER_BYTES = 4 * MIB
_NOT_PUBLISHED = "The disk changed written bytes. The save was not published; use another disk."


@dataclass(frozen=True, slots=True)
class Damage:
    """A place where a save is not as it was written.

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

    def error(self) -> CorruptSaveError:
        """Returns the error for it."""
        tensor = self.tensors[0] if self.tensors else None
        return CorruptSaveError(self.reason, file=self.file, tensor=tensor, offset=self.offset)


def read_back(folder: Path, files: Mapping[str, FileRecord], *, system: System) -> None:
    """Reads files that were just written, past the page cache.

    Raises:
        CorruptSaveError: The disk gives back other bytes than were written.
    """
    for name, record in files.items():
        check = FileCheck(system, folder, name, record, past_cache=True)
        with damage_named(folder, advice=_NOT_PUBLISHED):
            for damage in check.damages():
                raise damage.error()


class FileCheck:
    """One file of a save that is read and compared.

    Args:
        system: Makes the system calls.
        folder: The save's directory.
        name: The file's name in it.
        record: What the file is to be.
        on_bytes: Is called with each number of bytes read.
        past_cache: Whether to read what the disk has, and not what memory still has of it.
    """

    def __init__(
        self,
        system: System,
        folder: Path,
        name: str,
        record: FileRecord,
        on_bytes: Callable[[int], None] | None = None,
        *,
        past_cache: bool = False,
    ) -> None:
        self.num_bytes = 0
        self._system = system
        self._folder = folder
        self._name = name
        self._record = record
        self._on_bytes = on_bytes
        self._past_cache = past_cache
        room = min(_BUFFER_BYTES, record.chunk_bytes, record.num_bytes)
        self._buffer = memoryview(mmap.mmap(-1, _rounded(max(room, 1))))
        self._is_direct = past_cache and O_DIRECT != 0
        self._fd: Descriptor

    def damages(self) -> Iterator[Damage]:
        """Yields what is not as it was written."""
        entries: Sequence[StoredEntry] = ()
        try:
            entries = read_header(self._folder, self._name, self._record, system=self._system)
        except CheckpointError as error:
            yield damage_of(error, self._name)
        try:
            self._open()
        except OSError:
            return  # said already: so was the header's file
        try:
            for index, expected in enumerate(self._record.crc32):
                damage = self._check_chunk(index, expected, entries)
                if damage is not None:
                    yield damage
        finally:
            close_quietly(self._system, self._fd)

    def _open(self) -> None:
        path = self._folder / self._name
        if self._is_direct:
            try:
                self._fd = self._system.open(path, os.O_RDONLY | O_DIRECT)
            except OSError as error:
                if error.errno not in UNSUPPORTED:
                    raise
                self._is_direct = False
            else:
                return
        self._fd = self._system.open(path, os.O_RDONLY)
        if self._past_cache:
            self._system.drop_cache(self._fd)

    def _read(self, offset: int, num_bytes: int) -> memoryview:
        """Returns bytes of the file, fewer where it ends before."""
        try:
            return self._read_as_opened(offset, num_bytes)
        except OSError as error:
            if not self._is_direct or error.errno not in UNSUPPORTED:
                raise
        self._is_direct = False
        close_quietly(self._system, self._fd)
        self._open()
        return self._read_as_opened(offset, num_bytes)

    def _read_as_opened(self, offset: int, num_bytes: int) -> memoryview:
        asked = self._buffer[: _rounded(num_bytes) if self._is_direct else num_bytes]
        done = 0
        while done < num_bytes:
            count = self._system.preadv(self._fd, [asked[done:]], offset + done)
            if count == 0:
                break
            done += count
        return self._buffer[: min(done, num_bytes)]

    def _check_chunk(
        self, index: int, expected: int, entries: Sequence[StoredEntry]
    ) -> Damage | None:
        offset = start = index * self._record.chunk_bytes
        stop = min(start + self._record.chunk_bytes, self._record.num_bytes)
        reason = ""
        summed = 0
        while offset < stop:
            wanted = min(_BUFFER_BYTES, stop - offset)
            try:
                view = self._read(offset, wanted)
            except OSError as error:
                reason = f"cannot be read: {error}"
                break
            summed = crc32(view, summed)
            offset += view.nbytes
            self.num_bytes += view.nbytes
            if self._on_bytes is not None:
                self._on_bytes(view.nbytes)
            if view.nbytes < wanted:
                reason = f"end at {offset}, expected {self._record.num_bytes} bytes"
                break
        if not reason and summed == expected:
            return None
        reason = reason or f"have the checksum {summed:08x}, and had {expected:08x} when written"
        tensors = _tensors_in(entries, start, stop)
        owners = f" ({', '.join(tensors)})" if tensors else ""
        text = f"{self._name}: the bytes {start} to {stop}{owners} {reason}."
        return Damage(self._name, tensors, start, text)


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _tensors_in(entries: Sequence[StoredEntry], start: int, stop: int) -> tuple[str, ...]:
    return tuple(
        entry.name
        for entry in entries
        if entry.start < stop and start < entry.start + entry.num_bytes
    )


def damage_of(error: CheckpointError, file: str) -> Damage:
    """Returns what an error says; of one that names no file, the file is the one being read."""
    if isinstance(error, CorruptSaveError):
        tensors = () if error.tensor is None else (error.tensor,)
        return Damage(error.file or file, tensors, error.offset, str(error))
    return Damage(file, (), None, str(error))
