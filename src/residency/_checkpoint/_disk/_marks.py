"""What in a directory of saves is the library's own: known by its content, never by a name alone.

A save carries its manifest; a save under way the file that its writers lock, or the reports of its
ranks. In a folder with such a mark the files that it names are ours, and in one without a mark only
what begins as a file of ours does. Whatever else is there is left, and stops nothing. Invariant,
which ``tests/checkpoint/disk/test_foreign.py`` tries to break: nothing is removed that is not a
regular file or an empty directory.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from residency._checkpoint._disk._manifest import MANIFEST, MANIFEST_BEGIN, parse_manifest
from residency._checkpoint._disk._system import System, close_quietly, read_bytes, read_file
from residency._errors import CheckpointError

WRITERS = ".writers"
DATA_SUFFIX = ".safetensors"

_REPORT = re.compile(r"(rank|failed)-\d{5,}\.json(\.partial)?|(offered|taken)-\d{5,}-[0-9a-f]{16}")
_ENTRY = re.compile(r"(offered|taken)-(\d{5,})-([0-9a-f]{16})")
_REPORT_BEGIN = b'{"rank":'
_DATA_BEGIN = b'{"__metadata__":{"format":"pt","residency":"'
_LENGTH_BYTES = 8  # before the JSON of a safetensors header


def report_name(rank: int) -> str:
    """Returns the name of the file in which a rank says what it wrote."""
    return f"rank-{rank:05d}.json"


def failure_name(rank: int) -> str:
    """Returns the name of the file in which a rank says that it failed."""
    return f"failed-{rank:05d}.json"


@dataclass(frozen=True, slots=True)
class AttemptMark:
    """A file without bytes in rank 0's directory: the attempt of another rank that goes with it.

    Attributes:
        rank: The other rank.
        attempt: Its attempt.
        is_taken: Whether rank 0 said that it does; the other rank offered it before.
    """

    rank: int
    attempt: str
    is_taken: bool

    @property
    def name(self) -> str:
        """The name of the file."""
        return f"{'taken' if self.is_taken else 'offered'}-{self.rank:05d}-{self.attempt}"


def entries_in(names: list[str]) -> list[AttemptMark]:
    """Returns the entries among the names in a directory."""
    found = filter(None, map(_ENTRY.fullmatch, names))
    return [AttemptMark(int(match[2]), match[3], match[1] == "taken") for match in found]


def is_of_ranks(name: str) -> bool:
    """Returns whether a file in a save's directory serves only until the save is published."""
    return name == WRITERS or _REPORT.fullmatch(name) is not None


def is_own_folder(system: System, folder: Path) -> bool:
    """Returns whether this is a directory with a mark of ours, or an empty one."""
    return _has_kind(system, folder, stat.S_ISDIR) and _is_own(
        system, folder, _names(system, folder)
    )


def is_own_probe(system: System, path: Path) -> bool:
    """Returns whether this is an empty file."""
    return _has_kind(system, path, stat.S_ISREG) and system.stat(path).st_size == 0


def remove_own(system: System, folder: Path) -> bool:
    """Removes what is ours of a directory, and the directory once it is empty.

    Returns:
        Whether nothing of it is left; nothing to remove is fine.
    """
    if not _has_kind(system, folder, stat.S_ISDIR):
        return not _has_kind(system, folder, lambda mode: True)
    names = _names(system, folder)
    for name in _own_files(system, folder, names):
        if _has_kind(system, folder / name, stat.S_ISREG):
            with suppress(FileNotFoundError):
                system.unlink(folder / name)
    if _names(system, folder):
        return False
    with suppress(FileNotFoundError):
        system.rmdir(folder)
    return True


def _own_files(system: System, folder: Path, names: list[str]) -> Iterator[str]:
    """Yields the files that are ours, what marks the folder last."""
    marks = [name for name in (WRITERS, f"{MANIFEST}.partial", MANIFEST) if name in names]
    data = [name for name in names if name.endswith(DATA_SUFFIX)]
    if not _is_own(system, folder, names):
        marks = []
        data = [name for name in data if _begins(system, folder / name, _DATA_BEGIN, _LENGTH_BYTES)]
    elif (listed := _listed(system, folder)) is not None:
        data = [name for name in names if name in listed]
    yield from data
    yield from (name for name in names if _REPORT.fullmatch(name) and marks)
    yield from marks


def _listed(system: System, folder: Path) -> set[str] | None:
    """Returns the files that the manifest names; None where none can be read."""
    try:
        manifest = parse_manifest(read_file(system, folder / MANIFEST))
    except (CheckpointError, OSError):
        return None
    return {name for rank in manifest.ranks for name in rank.files}


def _is_own(system: System, folder: Path, names: list[str]) -> bool:
    if MANIFEST in names:
        return _begins(system, folder / MANIFEST, MANIFEST_BEGIN)
    reports = (name for name in names if _REPORT.fullmatch(name))
    return (
        not names
        or WRITERS in names
        or any(_begins(system, folder / name, _REPORT_BEGIN) for name in reports)
    )


def _names(system: System, folder: Path) -> list[str]:
    try:
        return system.listdir(folder)
    except FileNotFoundError:
        return []


def _has_kind(system: System, path: Path, is_kind: Callable[[int], bool]) -> bool:
    try:
        return is_kind(system.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _begins(system: System, file: Path, begin: bytes, offset: int = 0) -> bool:
    if not _has_kind(system, file, stat.S_ISREG):
        return False
    try:
        fd = system.open(file, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return read_bytes(system, fd, len(begin), offset) == begin
    finally:
        close_quietly(system, fd)
