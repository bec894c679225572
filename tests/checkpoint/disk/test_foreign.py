"""What others put into a directory of saves stays, and stops nothing."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from residency._checkpoint._disk._marks import WRITERS, remove_own
from residency._checkpoint._disk._open_save import open_save
from residency._checkpoint._disk._publish import Retention
from residency._checkpoint._disk._published import newest_save
from residency._checkpoint._disk._system import SYSTEM, System
from residency._checkpoint._disk._verify import verify_save
from residency._errors import (
    CheckpointError,
    CorruptSaveError,
    InvalidArgumentError,
    RefusedError,
)

KEEP_ONE = Retention(newest=1)


def contents_of(path: Path) -> dict[str, bytes]:
    files = (file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def put_folder(path: Path) -> None:
    (path / "sub").mkdir(parents=True)
    (path / "notes.txt").write_text("mine")
    (path / "sub" / "model.safetensors").write_bytes(b"mine, too")


def put_file(path: Path) -> None:
    path.write_text("mine")


FOREIGN: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a folder where a removal would be": (".removing-x", put_folder),
    "a file where a removal would be": (".removing-x", put_file),
    "a folder where a save would be under way": (".saving-00000005-x", put_folder),
    "a file where a save would be under way": (".saving-00000005-x", put_file),
    "a folder where a replaced save would be": (".replaced-00000005-x", put_folder),
    "a file where a replaced save would be": (".replaced-00000009-x", put_file),
    "a folder where a link would be": (".latest-x", put_folder),
    "a file where a probe would be": (".probe-x", put_file),
    "a folder named latest": ("latest", put_folder),
    "a file named latest": ("latest", put_file),
    "a link named latest": ("latest", lambda path: path.symlink_to("/somewhere/else")),
    "a folder of another step": ("step-00000001", put_folder),
    "a link to itself": ("step-00000003", lambda path: path.symlink_to(path)),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_what_is_not_ours_is_left_and_saves_go_on(
    saves: ModuleType, tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    name, put = FOREIGN[case]
    put(tmp_path / name)
    before = contents_of(tmp_path)
    where = saves.directory(tmp_path, saves.Unsynced())
    for step in (5, 6, 6):
        where.save(saves.request(step, step + 10), timeout_seconds=0)
    where.clean_up()
    assert where.apply(KEEP_ONE) == [5]
    assert where.steps() == [6]
    saves.contents(tmp_path, 6)
    after = contents_of(tmp_path)
    assert {name: after.get(name) for name in before} == before
    assert os.path.lexists(tmp_path / name)
    assert not [
        n for n in os.listdir(tmp_path) if n.startswith((".latest-", ".probe-")) and n != name
    ]
    assert not caplog.records


@pytest.mark.parametrize("kind", ["folder", "file", "link to a save"])
def test_what_has_the_name_of_a_new_save_is_moved_aside_whole(
    saves: ModuleType, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    run, target = tmp_path / "run", tmp_path / "run" / "step-00000005"
    saves.save(tmp_path / "archive", 5, 55)
    run.mkdir()
    {
        "folder": put_folder,
        "file": put_file,
        "link to a save": lambda path: path.symlink_to(tmp_path / "archive" / "step-00000005"),
    }[kind](target)
    before = contents_of(tmp_path / "archive") | {"seen": str(target.is_dir()).encode()}
    with caplog.at_level(logging.WARNING, logger="residency"):
        saves.save(run, 5, 11)
    saves.check_whole(run, {5: {11}})
    [moved] = run.glob("step-00000005.not-a-save-*")
    assert str(moved) in caplog.text
    assert contents_of(tmp_path / "archive") | {"seen": str(moved.is_dir()).encode()} == before
    if kind == "folder":
        assert contents_of(moved).keys() == {"notes.txt", "sub/model.safetensors"}
    saves.save(run, 6, 12)
    saves.directory(run).apply(KEEP_ONE)
    assert moved.exists()


def test_a_link_and_a_folder_with_the_names_of_ours_stay_when_a_save_goes(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / ".removing", tmp_path / "elsewhere"
    folder.mkdir()
    (folder / WRITERS).touch()
    elsewhere.write_text("mine")
    (folder / "linked.safetensors").symlink_to(elsewhere)
    (folder / "folder.safetensors").mkdir()
    (folder / "ours.safetensors").touch()
    assert not remove_own(SYSTEM, folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "folder.safetensors",
        "linked.safetensors",
    ]


def test_a_folder_in_a_save_stays_when_the_save_goes(saves: ModuleType, tmp_path: Path) -> None:
    saves.save(tmp_path, 1, 11)
    put_folder(tmp_path / "step-00000001" / "hf")
    put_file(tmp_path / "step-00000001" / "mine.safetensors")
    where = saves.directory(tmp_path, saves.Unsynced())
    for step in (2, 3):
        where.save(saves.request(step, 22), timeout_seconds=0)
        assert where.apply(KEEP_ONE) == [step - 1]
    assert sorted(contents_of(tmp_path / "step-00000001")) == [
        "hf/notes.txt",
        "hf/sub/model.safetensors",
        "mine.safetensors",
    ]
    assert where.steps() == [3]
    saves.save(tmp_path, 1, 33)  # the step is free again
    saves.contents(tmp_path, 1)
    assert len(list(tmp_path.glob("step-00000001.not-a-save-*/hf/notes.txt"))) == 1


def test_a_link_to_a_save_elsewhere_is_never_followed_to_remove_it(
    saves: ModuleType, tmp_path: Path
) -> None:
    saves.save(tmp_path / "archive", 1, 11)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-00000001").symlink_to(tmp_path / "archive" / "step-00000001")
    saves.save(tmp_path / "run", 2, 22)
    saves.directory(tmp_path / "run").apply(KEEP_ONE)
    saves.check_whole(tmp_path / "archive", {1: {11}})


def test_files_of_a_save_are_told_from_reports_by_their_ending(
    saves: ModuleType, tmp_path: Path
) -> None:
    request = saves.request(1, 11)
    named = [f"rank-{n}.safetensors" for n in range(2)]
    files = [type(p)(n, p.parts) for n, p in zip(named, request.files, strict=True)]
    saves.directory(tmp_path).save(type(request)(1, files, *_rest(request)), timeout_seconds=0)
    saves.check_whole(tmp_path, {1: {11}})
    for name in ("rank-00000.json", "model", "failed-00001.json"):
        wrong = [type(files[0])(name, [])]
        with pytest.raises(InvalidArgumentError, match="does not end in"):
            saves.directory(tmp_path).save(
                type(request)(2, wrong, *_rest(request)), timeout_seconds=0
            )


def _rest(request: Any) -> tuple[Any, ...]:
    return request.document, request.metrics, request.rank, request.world_size, request.token


def test_a_loop_of_links_is_named(saves: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(CheckpointError, match="loop could not be listed"):
        saves.directory(tmp_path / "loop").steps()


class NoSyncOfNames(System):
    """Lets the n-th sync of a directory of saves fail, as a disk that goes away does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_broken = False
        self._renamed = False
        self._fds: set[int] = set()

    def perform(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        if name == "fsync" and arguments[0] in self._fds and self._renamed and self.is_broken:
            raise OSError(errno.EIO, "the disk is gone")
        found = function(*arguments)
        if name == "open" and arguments[0] == self.folder:
            self._fds.add(found)
        elif name == "close":
            self._fds.discard(arguments[0])
        elif name == "rename":
            self._renamed = True
        return found


@pytest.mark.parametrize("step", [1, 2])
def test_what_fails_after_the_publishing_rename_is_a_warning_and_keeps_the_older_saves(
    saves: ModuleType, tmp_path: Path, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    saves.save(tmp_path, 1, 11)
    system = NoSyncOfNames(tmp_path)
    where = saves.directory(tmp_path, system)
    system.is_broken = step == 2  # of step 1, the sync between the two renames is before the commit
    with caplog.at_level(logging.WARNING, logger="residency"):
        where.save(saves.request(step, 22), timeout_seconds=0)
    saves.check_whole(tmp_path, {1: {11 if step == 2 else 22}, **({2: {22}} if step == 2 else {})})
    if step == 2:
        assert "is published" in caplog.text
        with pytest.raises(CheckpointError, match="the disk is gone"):
            where.apply(KEEP_ONE)
        assert where.steps() == [1, 2]
        system.is_broken = False
        assert where.apply(KEEP_ONE) == [1]


def test_a_relative_directory_stays_the_same_after_a_change_of_directory(
    saves: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    where = saves.directory(Path("run"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    where.save(saves.request(1, 11), timeout_seconds=0)
    saves.check_whole(tmp_path / "run", {1: {11}})
    assert newest_save(tmp_path / "run") == tmp_path / "run" / "step-00000001"
    shutil.rmtree(tmp_path / "run")
    assert newest_save(tmp_path / "run") is None


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "manifest.json"])
def test_a_pipe_in_the_place_of_a_file_is_damage_and_nobody_waits_for_it(
    saves: ModuleType, tmp_path: Path, name: str
) -> None:
    saves.save(tmp_path, 1, 11)
    folder = tmp_path / "step-00000001"
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(CorruptSaveError, match=name):
        open_save(folder)
    if name != "manifest.json":  # without which it is no save
        (damage,) = {each.file for each in verify_save(saves.directory(tmp_path), 1).damages}
        assert damage == name


def test_nothing_is_written_where_a_link_in_the_place_of_the_lock_leads(
    saves: ModuleType, tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_text("mine")
    folder = tmp_path / "saves"
    folder.mkdir()
    (folder / ".lock").symlink_to(theirs)
    with pytest.raises((RefusedError, CheckpointError, OSError), match=r"\.lock"):
        saves.save(folder, 1, 11)
    assert theirs.read_text() == "mine"


def test_a_manifest_for_which_there_is_no_memory_cannot_be_read(
    saves: ModuleType, tmp_path: Path
) -> None:
    saves.save(tmp_path, 1, 11)
    os.truncate(tmp_path / "step-00000001" / "manifest.json", 1 << 43)
    with pytest.raises(CheckpointError, match="no memory for its"):
        saves.directory(tmp_path).open(1)
