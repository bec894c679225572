"""A save that is read back is published only when the disk gives back what was written."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from residency._checkpoint._disk._publish import CheckpointDirectory
from residency._checkpoint._disk._system import O_DIRECT, System
from residency._checkpoint._disk._verify import verify_save
from residency._errors import CheckpointError, CorruptSaveError


class Losing(System):
    """A disk that keeps other bytes of the tensors than it was given."""

    def perform(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        if name == "pwritev" and arguments[2] >= 8192:
            fd, buffers, offset = arguments
            return function(fd, [bytes(each.nbytes) for each in buffers], offset)
        return function(*arguments)


class Recording(System):
    """Notes how files are read; refuses direct reads where it is asked to.

    Args:
        refused: What refuses them: ``"open"``, ``"preadv"`` or nothing.
    """

    def __init__(self, refused: str = "") -> None:
        self.opened: list[bool] = []
        self.dropped = 0
        self._refused = refused
        self._direct: set[int] = set()

    def perform(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        if name == "fadvise":
            self.dropped += 1
        if name == "open" and not arguments[1] & os.O_WRONLY and "step" not in str(arguments[0]):
            is_direct = bool(arguments[1] & O_DIRECT)
            if arguments[0].suffix == ".safetensors":
                self.opened.append(is_direct)
            if is_direct and self._refused == "open":
                raise OSError(errno.EINVAL, "no direct reads")
            fd = function(*arguments)
            if is_direct:
                self._direct.add(fd)
            return fd
        if name == "preadv" and arguments[0] in self._direct and self._refused == "preadv":
            raise OSError(errno.EINVAL, "no direct reads")
        if name == "close":
            self._direct.discard(arguments[0])
        return function(*arguments)


def reading(saves: ModuleType, path: Path, system: System) -> CheckpointDirectory:
    return CheckpointDirectory(path, system=system, chunk_bytes=saves.CHUNK_BYTES, reads_back=True)


def test_what_the_disk_changes_is_never_published_and_the_save_before_it_stays(
    saves: ModuleType, tmp_path: Path
) -> None:
    saves.save(tmp_path, 1, 11)
    with pytest.raises(CorruptSaveError, match=r"model\.safetensors: the bytes .* have the"):
        reading(saves, tmp_path, Losing()).save(saves.request(2, 22), timeout_seconds=0)
    saves.check_whole(tmp_path, {1: {11}, 2: {0}})
    # Without reading back nobody knows before the restore: the test above can fail.
    saves.directory(tmp_path, Losing()).save(saves.request(2, 22), timeout_seconds=0)
    assert verify_save(saves.directory(tmp_path), 2).damages


@pytest.mark.parametrize("refused", ["", "open", "preadv"])
def test_a_save_is_read_past_the_page_cache(
    saves: ModuleType, tmp_path: Path, refused: str
) -> None:
    system = Recording(refused)
    reading(saves, tmp_path, system).save(saves.request(1, 11), timeout_seconds=0)
    saves.check_whole(tmp_path, {1: {11}})
    assert any(system.opened) == bool(O_DIRECT)
    if refused:
        assert system.dropped == len(saves.SHAPES)


def test_a_fault_of_any_call_leaves_the_save_before_or_both(
    saves: ModuleType, tmp_path: Path
) -> None:
    system = saves.FaultySystem()
    saves.save(tmp_path, 1, 11)
    reading(saves, tmp_path, system).save(saves.request(2, 22), timeout_seconds=0)
    num_reads = 0
    for at, name in enumerate(system.names):
        if name not in {"preadv", "fadvise", "fstat"}:
            continue  # the others are those of every save
        num_reads += 1
        saves.prepare(tmp_path, "next")
        faulty = saves.FaultySystem(at, saves.failing(errno.EIO))
        try:
            reading(saves, tmp_path, faulty).save(saves.request(2, 22), timeout_seconds=0)
        except CheckpointError:
            saves.check_whole(tmp_path, {1: {11}, 2: {0, 22}})
        else:
            saves.check_whole(tmp_path, {1: {11}, 2: {22}})
    assert num_reads > 10
