"""A file of a checkpoint has its name when it is whole, whatever fails or dies meanwhile."""

from __future__ import annotations

import errno
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from residency._checkpoint._disk._system import System
from residency.integrations.lightning import _whole_files
from residency.integrations.lightning._whole_files import local_path, named_when_whole

OLD, NEW = b"old" * 1000, b"new" * 1000


class Failing(System):
    """Fails, or ends the process, in one of its calls."""

    def __init__(self, at: int, kills: bool = False) -> None:
        self.count, self.at, self.kills = 0, at, kills

    def perform(self, name: str, function: Callable[..., object], *arguments: object) -> Any:
        self.count += 1
        if self.count == self.at:
            if self.kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        return function(*arguments)


def write(final: Path) -> None:
    with named_when_whole(final) as draft:
        draft.write_bytes(NEW[:1000])
        draft.with_name("beside").write_bytes(NEW)
        with draft.open("ab") as file:
            file.write(NEW[1000:])


def num_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    counting = Failing(-1)
    monkeypatch.setattr(_whole_files, "SYSTEM", counting)
    write(tmp_path / "counted" / "a.ckpt")
    return counting.count


@pytest.mark.parametrize("has_old", [False, True])
def test_a_failure_of_any_system_call_leaves_the_old_file_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_old: bool
) -> None:
    for at in range(1, num_calls(tmp_path, monkeypatch) + 1):
        final = tmp_path / str(at) / "a.ckpt"
        if has_old:
            final.parent.mkdir()
            final.write_bytes(OLD)
        monkeypatch.setattr(_whole_files, "SYSTEM", Failing(at))
        failed = False
        try:
            write(final)
        except OSError:
            failed = True
        found = final.read_bytes() if final.exists() else None
        # After the rename nothing is an error any more.
        assert found == (NEW if not failed else OLD if has_old else None) or found == NEW, at
        assert failed or found == NEW, at
        monkeypatch.setattr(_whole_files, "SYSTEM", System())
        write(final)
        assert sorted(os.listdir(final.parent)) == ["a.ckpt", "beside"], at


def test_a_kill_at_any_system_call_leaves_the_old_file_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = num_calls(tmp_path, monkeypatch)
    for at in random.sample(range(1, most + 1), min(most, 16)):
        final = tmp_path / str(at) / "a.ckpt"
        final.parent.mkdir()
        final.write_bytes(OLD)
        child = os.fork()
        if not child:
            _whole_files.SYSTEM = Failing(at, kills=True)  # type: ignore[misc]
            write(final)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (-signal.SIGKILL, 1)
        assert final.read_bytes() in (OLD, NEW), at
        assert not [n for n in os.listdir(final.parent) if n.endswith(".ckpt") and n != "a.ckpt"]
        monkeypatch.setattr(_whole_files, "SYSTEM", System())
        write(final)
        assert sorted(os.listdir(final.parent)) == ["a.ckpt", "beside"], at


def test_an_error_of_the_block_keeps_the_old_file(tmp_path: Path) -> None:
    final = tmp_path / "a.ckpt"
    final.write_bytes(OLD)

    def fail() -> None:
        with named_when_whole(final) as draft:
            draft.write_bytes(NEW)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert final.read_bytes() == OLD
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_what_is_foreign_or_being_written_stays(tmp_path: Path) -> None:
    foreign = tmp_path / ".residency-saving-0123456789abcdef"
    foreign.mkdir()
    (foreign / "mine").write_bytes(OLD)
    (tmp_path / ".residency-saving-fedcba9876543210").write_bytes(OLD)
    with named_when_whole(tmp_path / "a.ckpt") as first:
        first.write_bytes(OLD)
        write(tmp_path / "b.ckpt")
        assert first.read_bytes() == OLD
    assert (foreign / "mine").read_bytes() == OLD
    assert len(os.listdir(tmp_path)) == 5


@pytest.mark.parametrize(
    ("path", "expected"),
    [("s3://bucket/a", None), ("file:///x/a", "/x/a"), (Path("/x/../y"), "/y"), ("/x", "/x")],
)
def test_only_paths_of_a_local_file_system_are_taken(path: object, expected: str | None) -> None:
    assert local_path(path) == (None if expected is None else Path(expected))
