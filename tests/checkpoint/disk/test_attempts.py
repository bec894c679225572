"""Ranks that try a save again agree, whoever failed, left it out or died in the attempts before.

The judge: what is published is of one attempt of each rank, all bytes of it, and the last attempt,
which all ranks make, is published. ``attempts.py`` is one rank.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from limits import WORKER_SECONDS

from residency._checkpoint._disk._marks import report_name
from residency._errors import CheckpointError

SCRIPT = Path(__file__).with_name("attempts.py")
NUM_ATTEMPTS = 3  # as there


def run_rank(path: Path, rank: int, world_size: int, schedule: int) -> list[str]:
    """Runs a rank, again whenever it was killed; returns what became of its last attempts."""
    while True:
        progress = path.with_name("aside") / f"next-{rank}"
        first = progress.read_text() if progress.exists() else "0"
        done = subprocess.run(
            [sys.executable, SCRIPT, path, *map(str, (rank, world_size, schedule)), first],
            capture_output=True,
            text=True,
            timeout=WORKER_SECONDS,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        if done.returncode != -signal.SIGKILL:
            assert done.returncode == 0, f"rank {rank}: {done.stderr}"
            found: list[str] = json.loads(done.stdout)
            return found


def check_schedule(folder: Path, world_size: int, schedule: int) -> None:
    path = folder / "saves"
    (folder / "aside").mkdir()
    with ThreadPoolExecutor(world_size) as pool:
        outcomes = list(
            pool.map(lambda rank: run_rank(path, rank, world_size, schedule), range(world_size))
        )
    assert [each[-1] for each in outcomes] == ["saved"] * world_size, outcomes
    left = [name for name in os.listdir(path) if name.startswith(".s")]
    assert left == [], (left, outcomes)


@pytest.mark.parametrize(
    ("world_size", "schedule"),
    [
        # Each number of ranks and two schedules; the other pairs are in the second tier.
        pytest.param(n, s, marks=[] if (n, s) in ((2, 1), (3, 2)) else pytest.mark.whole)
        for n in (2, 3)
        for s in range(4)
    ],
)
def test_the_last_attempt_is_published_whatever_the_ranks_did_before(
    tmp_path: Path, world_size: int, schedule: int
) -> None:
    check_schedule(tmp_path, world_size, schedule)


@pytest.mark.skipif(
    "RESIDENCY_TEST_SCHEDULES" not in os.environ, reason="minutes: set RESIDENCY_TEST_SCHEDULES=30"
)
@pytest.mark.parametrize("schedule", range(4, int(os.environ.get("RESIDENCY_TEST_SCHEDULES") or 5)))
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_last_attempt_is_published_after_more_schedules(
    tmp_path: Path, world_size: int, schedule: int
) -> None:
    check_schedule(tmp_path, world_size, schedule)


class Ranks:
    """The directories of all ranks, in one process; each saves in a thread of its own."""

    def __init__(self, saves: ModuleType, path: Path, world_size: int = 2) -> None:
        self.saves, self.path, self.world_size = saves, path, world_size
        self.directories = [saves.directory(path, saves.Unsynced()) for _ in range(world_size)]
        self.pool = ThreadPoolExecutor(world_size)

    def request(self, rank: int, seed: int, **others: Any) -> Any:
        made = self.saves.request(2, seed, rank=rank, world_size=self.world_size, token="run")
        return replace(made, **others)

    def begin(self, rank: int, seed: int, timeout: float = 30.0, **others: Any) -> Future[Any]:
        request = self.request(rank, seed, **others)
        where = self.directories[rank]
        return self.pool.submit(where.save, request, timeout_seconds=timeout)

    def refuse(self, rank: int, seed: int, reason: str = "refused") -> None:
        self.directories[rank].give_up(self.request(rank, seed), ValueError(reason))

    def seeds(self) -> list[int]:
        found = self.saves.directory(self.path).open(2)
        return [document["tree"]["seed"] for document in found.documents]


@pytest.fixture
def ranks(saves: ModuleType, tmp_path: Path) -> Ranks:
    return Ranks(saves, tmp_path)


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_left_an_attempt_out_agrees_in_the_next(ranks: Ranks, absent: int) -> None:
    for seed in (11, 22):  # twice in a row
        alone = ranks.begin(1 - absent, seed, timeout=0.2)
        with pytest.raises(CheckpointError, match=r"within 0\.2 s"):
            alone.result()
    for save in [ranks.begin(rank, 33) for rank in range(2)]:
        save.result()
    assert ranks.seeds() == [33, 33]


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_refused_is_not_waited_for_to_the_end(ranks: Ranks, late: int) -> None:
    ranks.refuse(1 - late, 11, "no such thing")
    with pytest.raises(CheckpointError, match=f"rank {1 - late} failed to save step 2: no such"):
        ranks.begin(late, 11, timeout=10).result()
    for save in [ranks.begin(rank, 22) for rank in range(2)]:
        save.result()
    assert ranks.seeds() == [22, 22]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_step_that_is_asked_for_again_takes_no_bytes_of_the_attempt_that_failed(
    ranks: Ranks, failing: int
) -> None:
    """One rank refuses in the call; all ranks call again before the others have written."""
    is_repeated = threading.Event()
    ranks.refuse(failing, 11)
    first = ranks.begin(1 - failing, 11, is_repeated=is_repeated.is_set)
    again = ranks.begin(failing, 22)
    is_repeated.set()
    with pytest.raises(CheckpointError, match=f"rank {failing} failed to save step 2: refused"):
        first.result()
    ranks.begin(1 - failing, 22).result()
    again.result()
    assert ranks.seeds() == [22, 22]


def test_a_save_that_is_published_before_a_rank_looks_again_is_published(
    ranks: Ranks, tmp_path: Path
) -> None:
    class Slow(ranks.saves.Unsynced):  # type: ignore[name-defined, misc]
        """Does nothing after its report until rank 0 has moved the directory."""

        reported: Path | None = None

        def perform(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
            until = time.monotonic() + 20
            while self.reported and self.reported.exists() and time.monotonic() < until:
                time.sleep(0.001)
            done = super().perform(name, function, *arguments)
            if name == "rename" and Path(arguments[1]).name == report_name(1):
                self.reported = Path(arguments[1])
            return done

    ranks.directories[1] = ranks.saves.directory(tmp_path, Slow())
    for save in [ranks.begin(rank, 11) for rank in range(2)]:
        save.result()
    assert ranks.seeds() == [11, 11]


def test_what_another_run_left_of_the_step_is_no_part_of_a_save(
    saves: ModuleType, tmp_path: Path
) -> None:
    old = Ranks(saves, tmp_path)
    with pytest.raises(CheckpointError):
        old.begin(1, 11, timeout=0.1, token="old").result()
    with pytest.raises(CheckpointError):
        old.begin(0, 11, timeout=0.1, token="old").result()
    new = Ranks(saves, tmp_path)
    for save in [new.begin(rank, 22, token="new") for rank in range(2)]:
        save.result()
    assert new.seeds() == [22, 22]
