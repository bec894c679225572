"""One directory has one writer, finds its whole saves, and keeps those that it is asked to keep."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import pytest

from residency._checkpoint._disk._publish import CheckpointDirectory, Retention
from residency._checkpoint._disk._published import PublishedSaves
from residency._errors import CheckpointError, InvalidArgumentError, RefusedError


def test_making_a_directory_object_creates_nothing(tmp_path: Path) -> None:
    where = CheckpointDirectory(tmp_path / "saves")
    assert where.steps() == []
    assert os.listdir(tmp_path) == []


def test_saves_are_listed_in_order_and_latest_names_the_newest(
    saves: ModuleType, tmp_path: Path
) -> None:
    for step in (10, 2, 300_000_000):
        saves.save(tmp_path, step, step % 7)
    where = saves.directory(tmp_path)
    assert where.steps() == [2, 10, 300_000_000]
    saves.save(tmp_path, 2, 5)  # an older one again: the newest stays the newest
    assert os.readlink(tmp_path / "latest") == "step-300000000"
    assert where.folder(10) == tmp_path / "step-00000010"
    with pytest.raises(CheckpointError, match="no save of step 11; it has: 2, 10, 300000000"):
        where.folder(11)


def test_what_is_no_save_is_not_listed(saves: ModuleType, tmp_path: Path) -> None:
    saves.save(tmp_path, 1, 11)
    for name in ("step-00000002", "step-3", "step-0000000x", ".saving-00000004-dead", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000005").write_text("a file")
    assert saves.directory(tmp_path).steps() == [1]


def test_a_second_writer_is_refused_by_the_number_of_the_first(
    saves: ModuleType, tmp_path: Path
) -> None:
    first, second = saves.directory(tmp_path), saves.directory(tmp_path)
    first.lock()
    first.lock()  # its own lock is no hindrance
    with pytest.raises(RefusedError, match=f"is being written by process {os.getpid()} on "):
        second.lock()
    released: saves.Counter[str] = saves.Counter()  # type: ignore[name-defined]
    with pytest.raises(RefusedError):
        second.save(saves.request(1, 11, released=released), timeout_seconds=0)
    assert released == dict.fromkeys(saves.tensors(0), 1)
    with pytest.raises(RefusedError):
        second.apply(Retention(newest=1))
    with pytest.raises(RefusedError):
        second.clean_up()
    first.save(saves.request(1, 11), timeout_seconds=0)
    first.unlock()
    second.save(saves.request(2, 22), timeout_seconds=0)
    assert first.steps() == [1, 2]


def test_a_second_writer_is_refused_where_the_first_ones_number_cannot_be_read(
    saves: ModuleType, tmp_path: Path
) -> None:
    class Unreadable(saves.System):  # type: ignore[name-defined, misc]
        def preadv(self, *arguments: object) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    first, second = saves.directory(tmp_path), saves.directory(tmp_path, Unreadable())
    first.lock()
    with pytest.raises(
        RefusedError, match=r"being written by process that cannot be named \(.*5\]"
    ):
        second.lock()
    first.unlock()


def holding(path: Path) -> subprocess.Popen[str]:
    """Starts a process that holds the lock until it is killed."""
    code = (
        "import sys; from residency._checkpoint._disk._publish import CheckpointDirectory as D\n"
        f"d = D({str(path)!r}); d.lock(); print('locked', flush=True); sys.stdin.read()"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    return process


def test_another_process_is_refused_until_the_first_is_dead(
    saves: ModuleType, tmp_path: Path
) -> None:
    process = holding(tmp_path)
    try:
        with pytest.raises(RefusedError, match=f"written by process {process.pid} on "):
            saves.save(tmp_path, 1, 11)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    saves.save(tmp_path, 1, 11)
    assert saves.directory(tmp_path).steps() == [1]


def test_a_forked_process_does_not_keep_the_lock_of_its_parent(
    saves: ModuleType, tmp_path: Path
) -> None:
    code = (
        "import os; from residency._checkpoint._disk._publish import CheckpointDirectory as D\n"
        f"d = D({str(tmp_path)!r}); d.lock(); read, write = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    os.close(write); os.read(read, 1); os._exit(0)\n"  # outlives nobody but the lock
        "d.unlock(); D(d.path).lock(); os.close(write); os.wait(); print('had')"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60
    )
    assert found.stdout == "had\n", found.stderr


def test_a_file_system_without_locks_is_used_with_a_warning(
    saves: ModuleType, tmp_path: Path
) -> None:
    class NoLocks(saves.System):  # type: ignore[misc,name-defined]
        def perform(self, name: str, function: Callable[..., object], *arguments: object) -> object:
            if name == "flock":
                raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
            return function(*arguments)

    (tmp_path / ".saving-00000009-perhaps-alive").mkdir()
    with pytest.warns(RuntimeWarning, match="without locks"):
        saves.save(tmp_path, 1, 11, NoLocks())
    saves.check_whole(tmp_path, {1: {11}})
    assert (tmp_path / ".saving-00000009-perhaps-alive").exists()


def test_what_dead_writers_left_is_removed_and_what_lives_is_not(
    saves: ModuleType, tmp_path: Path
) -> None:
    from residency._checkpoint._disk._lock import FileLock

    saves.save(tmp_path, 1, 11)
    for name in ("dead", "alive", "empty"):
        (tmp_path / f".saving-00000002-{name}").mkdir()
    (tmp_path / ".saving-00000002-dead" / ".writers").touch()
    (tmp_path / ".saving-00000002-dead" / "model.safetensors").write_bytes(b"half of it")
    (tmp_path / ".removing-abc").mkdir()
    alive = FileLock(saves.System(), tmp_path / ".saving-00000002-alive" / ".writers")
    assert alive.take(shared=True)
    removed = saves.directory(tmp_path).clean_up()
    assert {path.name for path in removed} == {".saving-00000002-dead", ".saving-00000002-empty"}
    assert not (tmp_path / ".removing-abc").exists()
    assert (tmp_path / ".saving-00000002-alive").exists()
    alive.give_back()
    assert len(saves.directory(tmp_path).clean_up()) == 1
    saves.check_whole(tmp_path, {1: {11}})


def test_between_the_renames_of_a_replaced_save_the_old_one_is_found(
    saves: ModuleType, tmp_path: Path
) -> None:
    saves.save(tmp_path, 1, 11)
    (tmp_path / "step-00000001").rename(tmp_path / ".replaced-00000001-abc")
    where = saves.directory(tmp_path)
    assert where.steps() == [1]
    saves.check_whole(tmp_path, {1: {11}})
    where.lock()
    assert where.folder(1) == tmp_path / "step-00000001"
    saves.check_whole(tmp_path, {1: {11}})
    where.unlock()
    # Both names are there: the new one counts, and the old one goes.
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".replaced-00000001-abc")
    saves.save(tmp_path, 1, 22)
    saves.check_whole(tmp_path, {1: {22}})
    assert not (tmp_path / ".replaced-00000001-abc").exists()


@pytest.mark.parametrize("moment", range(8))
def test_a_reader_finds_the_save_that_a_writer_replaces_between_its_looks(
    saves: ModuleType, tmp_path: Path, moment: int
) -> None:
    """At any call of the reader the writer does another of its renames."""
    saves.save(tmp_path, 1, 11)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".saving-00000001-abc")
    renames = [
        ("step-00000001", ".replaced-00000001-def"),
        (".saving-00000001-abc", "step-00000001"),
        (".replaced-00000001-def", ".removing-replaced-00000001-def"),
    ]

    class Beside(saves.Unsynced):  # type: ignore[name-defined, misc]
        num_calls = 0

        def perform(self, name: str, function: Callable[..., object], *arguments: object) -> object:
            done = super().perform(name, function, *arguments)
            for source, target in renames[: self.num_calls - moment + 1]:
                if (tmp_path / source).exists() and not (tmp_path / target).exists():
                    (tmp_path / source).rename(tmp_path / target)
                    break
            self.num_calls += 1
            return done

    assert list(PublishedSaves(Beside(), tmp_path).published()) == [1]


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (Retention(), [1, 2, 3, 4, 5]),
        (Retention(newest=2), [4, 5]),
        (Retention(newest=9), [1, 2, 3, 4, 5]),
        (Retention(best=2, metric="loss"), [2, 4, 5]),
        (Retention(newest=1, best=1, metric="loss", greatest=True), [1, 5]),
        (Retention(newest=1, best=9, metric="loss"), [1, 2, 4, 5]),
        (Retention(newest=1, best=9, metric="accuracy"), [5]),
    ],
)
def test_a_retention_keeps_the_newest_and_the_best(
    saves: ModuleType, tmp_path: Path, retention: Retention, kept: list[int]
) -> None:
    metrics: Mapping[int, dict[str, float]] = {
        1: {"loss": 9.0},
        2: {"loss": 1.0},
        3: {"loss": float("nan")},
        4: {"loss": 1.0},  # of two equal ones the newer counts
        5: {},
    }
    where = saves.directory(tmp_path)
    for step, figures in metrics.items():
        where.save(saves.request(step, step, metrics=figures), timeout_seconds=0)
    beyond = where.beyond(retention)
    assert where.apply(retention) == beyond == [step for step in metrics if step not in kept]
    assert where.steps() == kept
    for step in kept:
        assert saves.contents(tmp_path, step) == saves.tensors(step)


def test_a_retention_keeps_the_newest_save_that_can_be_read(
    saves: ModuleType, tmp_path: Path
) -> None:
    for step in (1, 2, 3):
        saves.save(tmp_path, step, step)
    (tmp_path / "step-00000003" / "manifest.json").write_bytes(b"{}")
    where = saves.directory(tmp_path)
    assert where.apply(Retention(newest=1)) == [1]
    assert where.steps() == [2, 3]


@pytest.mark.parametrize(
    "arguments",
    [{"newest": 0}, {"best": -1}, {"best": 1}, {"metric": "loss"}],
)
def test_a_retention_that_means_nothing_is_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(InvalidArgumentError):
        Retention(**arguments)  # type: ignore[arg-type]


def test_a_disk_without_the_room_is_refused_with_the_figures(
    saves: ModuleType, tmp_path: Path
) -> None:
    where = saves.directory(tmp_path / "saves")
    where.check_writable(1)
    with pytest.raises(RefusedError, match=r"left and the save needs 8\.00 TiB"):
        (saves.directory(tmp_path)).check_writable(8 * 2**40)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_directory_that_is_read_only_is_refused(
    saves: ModuleType, tmp_path: Path, number: int
) -> None:
    class ReadOnly(saves.System):  # type: ignore[misc,name-defined]
        def perform(self, name: str, function: Callable[..., object], *arguments: object) -> object:
            if name == "mkdir" or (name == "open" and arguments[1] & os.O_CREAT):  # type: ignore[operator]
                raise OSError(number, os.strerror(number))
            return function(*arguments)

    for path in (tmp_path, tmp_path / "below"):
        where = saves.directory(path, ReadOnly())
        for call in (lambda w=where: w.check_writable(1), where.lock):
            with pytest.raises(RefusedError, match=os.strerror(number)):
                call()
    assert os.listdir(tmp_path) == []


def test_a_file_in_the_place_of_the_directory_is_refused(saves: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RefusedError, match=r"is a file|Not a directory"):
            saves.save(path, 1, 11)
    assert (tmp_path / "file").read_text() == "a file"


@pytest.mark.parametrize(
    "fields",
    [
        {"step": -1, "seed": 1},
        {"step": 1, "seed": 1, "token": "../x"},
        {"step": 1, "seed": 1, "rank": 2, "world_size": 2},
    ],
)
def test_a_request_that_means_nothing_is_refused_and_released(
    saves: ModuleType, tmp_path: Path, fields: dict[str, int]
) -> None:
    released: saves.Counter[str] = saves.Counter()  # type: ignore[name-defined]
    request = saves.request(**fields, released=released)
    with pytest.raises(InvalidArgumentError):
        saves.directory(tmp_path).save(request, timeout_seconds=0)
    assert released == dict.fromkeys(saves.tensors(0), 1)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "given",
    [
        {"best": 1.5, "metric": "loss"},
        {"best": float("inf"), "metric": "loss"},
        {"best": True, "metric": "loss"},
        {"newest": 2.5},
        {"newest": "2"},
        {"best": 1, "metric": 3},
    ],
)
def test_a_retention_of_what_is_no_count_is_refused(given) -> None:
    with pytest.raises(InvalidArgumentError, match=r"whole number|give its name"):
        Retention(**given)
