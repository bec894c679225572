"""One rank of test_attempts.py: it tries a save again and again, or fails, skips it or dies.

``attempts.py DIRECTORY RANK WORLD_SIZE SCHEDULE FIRST``: the attempts of a schedule from the first
on, then, when every rank has come as far, one more by all. It prints what became of each as JSON.
"""

from __future__ import annotations

import errno
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import saves

from residency._checkpoint._disk._verify import verify_save
from residency._errors import CheckpointError, RefusedError

STEP = 2
NUM_ATTEMPTS = 3
SHORT_SECONDS, LONG_SECONDS = 0.5, 30.0
ACTIONS = ("save", "save", "skip", "refuse", "fail", "die")


def seed_of(attempt: int) -> int:
    """What the bytes of an attempt are drawn from."""
    return 11 * (attempt + 1)


def actions_of(schedule: int, rank: int) -> list[tuple[str, int]]:
    """What a rank does in each attempt, and at which system call."""
    draw = random.Random(1000 * schedule + rank)
    return [(draw.choice(ACTIONS), draw.randrange(70)) for _ in range(NUM_ATTEMPTS)]


def check_is_one_attempt_of_each(path: Path, world_size: int, own: tuple[int, int]) -> None:
    """Checks that each rank's bytes are all of one seed, and this rank's those of the given."""
    where = saves.directory(path)
    assert verify_save(where, STEP).damages == ()
    found = where.open(STEP)
    assert len(found.documents) == world_size
    for rank, document in enumerate(found.documents):
        seed = document["tree"]["seed"]
        assert rank != own[0] or seed == own[1], "this rank's bytes are another attempt's"
        for name, data in saves.tensors(seed, rank).items():
            file = saves.file_name(name.split(".")[0], rank=rank, world_size=world_size)
            (entry,) = [e for e in found.entries[name] if e.file == file]
            stored = (found.folder / file).read_bytes()
            assert stored[entry.start : entry.start + entry.num_bytes] == data, (rank, name)
    files = sorted(each.name for each in found.folder.iterdir())
    assert len(files) == 2 * world_size + 1, files


class Rank:
    """Makes one rank's attempts, with one directory for all of them, as a Checkpointer does."""

    def __init__(self, path: Path, rank: int, world_size: int) -> None:
        self.path, self.rank, self.world_size = path, rank, world_size
        self.system = saves.FaultySystem()
        self.directory = saves.directory(path, self.system)

    def request(self, attempt: int) -> Any:
        return saves.request(
            STEP, seed_of(attempt), rank=self.rank, world_size=self.world_size, token="run"
        )

    def attempt(self, number: int, action: str, at: int) -> str:
        if action == "skip":
            return "skipped"
        if action == "refuse":
            self.directory.give_up(self.request(number), ValueError("refused"))
            return "refused"
        fault = {"fail": saves.failing(errno.EIO), "die": saves.killing}.get(action)
        self.system.arm(at, fault)
        return self.save(number, SHORT_SECONDS)

    def save(self, number: int, timeout_seconds: float) -> str:
        try:
            self.directory.save(self.request(number), timeout_seconds=timeout_seconds)
        except (CheckpointError, RefusedError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            self.system.arm()
        check_is_one_attempt_of_each(self.path, self.world_size, (self.rank, seed_of(number)))
        return "saved"


def meet(aside: Path, rank: int, world_size: int) -> None:
    """Returns when every rank is here."""
    (aside / f"here-{rank}").touch()
    while not all((aside / f"here-{other}").exists() for other in range(world_size)):
        time.sleep(0.002)


def main(path: Path, rank: int, world_size: int, schedule: int, first: int) -> None:
    aside = path.with_name("aside")
    one = Rank(path, rank, world_size)
    outcomes = []
    for number, (action, at) in list(enumerate(actions_of(schedule, rank)))[first:]:
        (aside / f"next-{rank}").write_text(str(number + 1))  # where it goes on if it dies
        outcomes.append(f"{action}: {one.attempt(number, action, at)}")
    (aside / f"next-{rank}").write_text(str(NUM_ATTEMPTS))
    meet(aside, rank, world_size)
    outcomes.append(one.save(NUM_ATTEMPTS, LONG_SECONDS))
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
