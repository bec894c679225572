"""Whatever stops a save, and wherever: each save that is found is whole, and the next one works."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
from limits import WORKER_SECONDS

from residency._errors import CheckpointError, RefusedError

SCENARIOS = ["first", "next", "again", "another-again"]
NUMBERS = {"no room": errno.ENOSPC, "bad disk": errno.EIO}
IN_FIRST_TIER = [  # the ordinary one, and the one with a replacement beside another save
    pytest.param(each, marks=[pytest.mark.whole] * (each in ("first", "again")))
    for each in SCENARIOS
]
# Enough for any kill, and few enough to see that saves were killed where they write.
MIN_CALLS = 50


@pytest.mark.parametrize(
    "scenario",
    [*(pytest.param(each, marks=pytest.mark.whole) for each in SCENARIOS[:-1]), SCENARIOS[-1]],
)
def test_a_save_killed_at_any_system_call_leaves_old_or_new(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]], scenario: str
) -> None:
    process = start("kill", tmp_path / "saves", scenario)
    output, _ = process.communicate(timeout=WORKER_SECONDS)
    assert process.returncode == 0, output
    outcomes = json.loads(output)
    # Before each call, and after it (after half of it, when it writes).
    assert outcomes.keys() == {"killed"}
    assert outcomes["killed"] >= 2 * MIN_CALLS


@pytest.mark.parametrize(
    ("scenario", "number"),
    [  # in the first tier a pair for each
        pytest.param(
            scenario,
            number,
            id=f"{scenario}-{name}",
            marks=[pytest.mark.whole] * ((row + column) % 2),
        )
        for row, scenario in enumerate(SCENARIOS)
        for column, (name, number) in enumerate(NUMBERS.items())
    ],
)
def test_a_call_that_fails_is_reported_and_leaves_old_or_new(
    saves: ModuleType, tmp_path: Path, scenario: str, number: int
) -> None:
    path = tmp_path / "saves"
    num_reported = 0
    for at in range(saves.num_calls(path, scenario)):
        saves.prepare(path, scenario)
        system = saves.FaultySystem(at, saves.failing(number))
        error = error_of(partial(saves.save, path, *saves.SCENARIOS[scenario][1], system))
        if error is not None:
            num_reported += 1
            assert isinstance(error.__cause__, OSError)
            assert error.__cause__.errno == number
            assert os.strerror(number) in str(error)
        else:
            # Then it is published all the same: nothing but tidying up went wrong.
            assert system.names[at] in TIDYING, system.names[at]
            saves.check_whole(path, published(saves, scenario))
        saves.check_after_fault(path, scenario)
    assert num_reported >= MIN_CALLS / 2


def error_of(save: Callable[[], None]) -> Exception | None:
    try:
        save()
    except (CheckpointError, RefusedError) as error:
        return error
    return None


# What is not needed for a save that is whole: giving back, and what follows publication.
TIDYING = {
    "close",
    "flock",
    "fstat",
    "fsync",
    "listdir",
    "lstat",
    "preadv",
    "readlink",
    "rename",
    "rmdir",
    "stat",
    "symlink",
    "unlink",
    "open",
}


def published(saves: ModuleType, scenario: str) -> dict[int, set[int]]:
    _, (step, seed), allowed = saves.SCENARIOS[scenario]
    return {**allowed, step: {seed}}


@pytest.mark.parametrize("scenario", IN_FIRST_TIER)
def test_a_call_that_a_signal_interrupts_is_made_again(
    saves: ModuleType, tmp_path: Path, scenario: str
) -> None:
    path = tmp_path / "saves"
    for at in range(saves.num_calls(path, scenario)):
        saves.prepare(path, scenario)
        system = saves.FaultySystem(at, saves.failing(errno.EINTR))
        saves.save(path, *saves.SCENARIOS[scenario][1], system)
        saves.check_whole(path, published(saves, scenario))


def test_a_write_or_read_that_is_cut_short_is_continued(saves: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "saves"
    for at in range(saves.num_calls(path, "next")):
        saves.prepare(path, "next")
        saves.save(path, 2, 22, saves.FaultySystem(at, saves.shortening))
        saves.check_whole(path, published(saves, "next"))


def test_a_system_that_ends_every_write_within_a_page_is_served(
    saves: ModuleType, tmp_path: Path
) -> None:
    class LessThanPage(saves.System):  # type: ignore[misc,name-defined]
        def perform(self, name: str, function: Callable[..., object], *arguments: object) -> object:
            if name != "pwritev":
                return function(*arguments)
            fd, buffers, offset = arguments
            return function(fd, [buffers[0][:4095]], offset)  # type: ignore[index]

    saves.save(tmp_path, 1, 11, LessThanPage())
    saves.check_whole(tmp_path, {1: {11}})


def test_a_system_that_writes_nothing_is_an_error(saves: ModuleType, tmp_path: Path) -> None:
    class Nothing(saves.System):  # type: ignore[misc,name-defined]
        def perform(self, name: str, function: Callable[..., object], *arguments: object) -> object:
            return 0 if name == "pwritev" else function(*arguments)

    with pytest.raises(CheckpointError, match="wrote nothing"):
        saves.save(tmp_path, 1, 11, Nothing())


def test_everything_is_on_the_disk_before_it_counts(saves: ModuleType, tmp_path: Path) -> None:
    """Follows each write to its fsync, in the order of the calls."""
    dirty: set[str] = set()
    events: list[str] = []

    class Recorder(saves.System):  # type: ignore[misc,name-defined]
        def perform(self, name: str, function: Callable[..., object], *arguments: object) -> object:
            if name in {"pwritev", "ftruncate", "fsync"}:
                target = os.readlink(f"/proc/self/fd/{arguments[0]}")
                (dirty.discard if name == "fsync" else dirty.add)(target)
            if name in {"rename", "unlink", "mkdir"}:
                source = str(arguments[0])
                if name == "rename" and source.split("/")[-1].startswith(".saving"):
                    events.append("published")
                    inside = {entry for entry in dirty if "/.saving" in entry}
                    assert inside == set(), "published before it is on the disk"
                    assert os.path.exists(f"{source}/manifest.json")
                else:
                    assert source not in dirty, f"renamed before it is on the disk: {source}"
                dirty.add(str(Path(arguments[-1]).parent))  # type: ignore[arg-type]
            return function(*arguments)

    where = saves.directory(tmp_path / "saves", Recorder())
    where.save(saves.request(1, 11), timeout_seconds=0)
    assert events == ["published"]
    assert str(tmp_path / "saves") not in dirty, "the new name is not on the disk"


@pytest.mark.parametrize("refusal", ["open", "pwritev"])
@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_without_direct_writes_gets_them_through_its_cache(
    saves: ModuleType, tmp_path: Path, refusal: str, number: int
) -> None:
    refused: list[str] = []

    class NoDirect(saves.System):  # type: ignore[misc,name-defined]
        def perform(self, name: str, function: Callable[..., object], *arguments: object) -> object:
            if name == refusal == "open":
                is_direct = arguments[1] & os.O_DIRECT  # type: ignore[operator]
            elif name == refusal:
                flags = Path(f"/proc/self/fdinfo/{arguments[0]}").read_text().split()[3]
                is_direct = int(flags, 8) & os.O_DIRECT
            else:
                is_direct = False
            if is_direct:
                refused.append(name)
                raise OSError(number, os.strerror(number))
            return function(*arguments)

    where = saves.directory(tmp_path, NoDirect())
    where.save(saves.request(1, 11), timeout_seconds=0)
    assert refused
    saves.check_whole(tmp_path, {1: {11}})


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_a_file_system_that_reserves_nothing_is_written_without(
    saves: ModuleType, tmp_path: Path, number: int
) -> None:
    class NoReserve(saves.System):  # type: ignore[misc,name-defined]
        def perform(self, name: str, function: Callable[..., object], *arguments: object) -> object:
            if name == "fallocate":
                raise OSError(number, os.strerror(number))
            return function(*arguments)

    saves.save(tmp_path, 1, 11, NoReserve())
    saves.check_whole(tmp_path, {1: {11}})


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, None])
def test_every_part_is_released_once_whatever_happens(
    saves: ModuleType, tmp_path: Path, number: int | None
) -> None:
    names = list(saves.tensors(0))
    for at in range(saves.num_calls(tmp_path / "saves", "next")):
        saves.prepare(tmp_path / "saves", "next")
        released: saves.Counter[str] = saves.Counter()  # type: ignore[name-defined]
        fault = None if number is None else saves.failing(number)
        where = saves.directory(tmp_path / "saves", saves.FaultySystem(at, fault))
        try:
            where.save(saves.request(2, 22, released=released), timeout_seconds=0)
        except (CheckpointError, RefusedError):
            assert number is not None
        assert released == dict.fromkeys(names, 1)
        if number is None:
            break
