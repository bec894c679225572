"""Several processes make one save, or none: whoever dies, the saves before it stay."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from residency._checkpoint._disk._verify import verify_save
from residency._errors import CheckpointError

LONG, SHORT = "60", "0.5"


def results(processes: list[subprocess.Popen[str]]) -> list[dict[str, Any] | None]:
    """What each rank printed; None for one that was killed."""
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    return [json.loads(output) if output else None for output in outputs]


def check_together(saves: ModuleType, path: Path, world_size: int) -> None:
    """Checks every rank's tensors of the save that the ranks made."""
    where = saves.directory(path)
    assert verify_save(where, 2).damages == ()
    found = where.open(2)
    assert [d["tree"]["rank"] for d in found.documents] == list(range(world_size))
    for rank in range(world_size):
        for name, data in saves.tensors(22, rank).items():
            file = saves.file_name(name.split(".")[0], rank=rank, world_size=world_size)
            (entry,) = [e for e in found.entries[name] if e.file == file]
            stored = (found.folder / file).read_bytes()
            assert stored[entry.start : entry.start + entry.num_bytes] == data
    assert len(os.listdir(found.folder)) == 2 * world_size + 1


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_ranks_return_when_the_whole_save_is_published(
    saves: ModuleType,
    tmp_path: Path,
    start: Callable[..., subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
    world_size: int,
) -> None:
    monkeypatch.setenv("RANK_TIMEOUT", LONG)
    for token in "ab":  # the second replaces the first
        ranks = [start("rank", tmp_path, r, world_size, token) for r in range(world_size)]
        assert [r and r["error"] for r in results(ranks)] == [None] * world_size
        check_together(saves, tmp_path, world_size)


@pytest.mark.parametrize(
    ("victim", "kill_at"),
    [
        (0, "mkdir:1"),
        (0, "pwritev:4"),
        (0, "rename:1"),  # its report
        (0, "rename:2"),  # the manifest
        (0, "rename:3"),  # publication
        (1, "mkdir:1"),
        (1, "pwritev:4"),
        (1, "fsync:2"),
        (1, "rename:1"),
    ],
)
def test_a_rank_that_dies_fails_the_save_for_all_and_the_next_one_works(
    saves: ModuleType,
    tmp_path: Path,
    start: Callable[..., subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
    victim: int,
    kill_at: str,
) -> None:
    saves.save(tmp_path, 1, 11)
    monkeypatch.setenv("RANK_TIMEOUT", SHORT)
    ranks = [
        start("rank", tmp_path, r, 2, "one", *([kill_at] if r == victim else [])) for r in range(2)
    ]
    found = results(ranks)
    assert found[victim] is None, "it was to be killed"
    survivor = found[1 - victim]
    assert survivor is not None
    assert survivor["error"] == "CheckpointError"
    assert "step 2" in survivor["message"]
    saves.check_whole(tmp_path, {1: {11}})
    monkeypatch.setenv("RANK_TIMEOUT", LONG)
    ranks = [start("rank", tmp_path, r, 2, "another") for r in range(2)]
    assert [r and r["error"] for r in results(ranks)] == [None, None]
    check_together(saves, tmp_path, 2)
    assert [name for name in os.listdir(tmp_path) if name.startswith(".s")] == []


def test_a_rank_that_fails_tells_the_others_at_once(
    saves: ModuleType,
    tmp_path: Path,
    start: Callable[..., subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class NoRoom(saves.System):  # type: ignore[misc,name-defined]
        def perform(self, name: str, function: Callable[..., object], *arguments: object) -> object:
            if name == "fallocate":
                raise OSError(28, "No space left on device")
            return function(*arguments)

    saves.save(tmp_path, 1, 11)
    monkeypatch.setenv("RANK_TIMEOUT", LONG)
    others = [start("rank", tmp_path, r, 3, "together") for r in (0, 2)]
    failing = saves.directory(tmp_path, NoRoom())
    request = saves.request(2, 22, rank=1, world_size=3, token="together")
    with pytest.raises(CheckpointError, match="No space left"):
        failing.save(request, timeout_seconds=60)
    for found in results(others):  # long before their time is over
        assert found is not None
        assert "rank 1 failed to save step 2" in found["message"]
        assert "No space left" in found["message"]
    saves.check_whole(tmp_path, {1: {11}})
    saves.save(tmp_path, 2, 33)
    saves.check_whole(tmp_path, {1: {11}, 2: {33}})
    assert [name for name in os.listdir(tmp_path) if name.startswith(".s")] == []


def test_rank_0_that_is_refused_tells_the_others_at_once(
    saves: ModuleType,
    tmp_path: Path,
    start: Callable[..., subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saves.save(tmp_path, 1, 11)
    writer = saves.directory(tmp_path)
    writer.lock()
    monkeypatch.setenv("RANK_TIMEOUT", LONG)
    first, other = results([start("rank", tmp_path, r, 2, "together") for r in range(2)])
    assert first is not None
    assert first["error"] == "RefusedError"
    assert other is not None
    assert "rank 0 failed to save step 2" in other["message"]
    assert f"is being written by process {os.getpid()}" in other["message"]
    writer.save(saves.request(2, 33), timeout_seconds=0)
    writer.unlock()
    saves.check_whole(tmp_path, {1: {11}, 2: {33}})
    assert [name for name in os.listdir(tmp_path) if name.startswith(".s")] == []
