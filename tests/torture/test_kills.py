"""Training processes are killed or interrupted at random moments: what was saved is whole.

Each run is a process of its own, forked from a warm one (``kill_program.py``), that logs a digest
of its state before every save. Digests of a run that torch's own optimizer trained without a save
say what is right; files are read with json, zlib and stock safetensors.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from random_states import check_format
from warm_process import Running, Server

pytestmark = pytest.mark.whole

Judge = Callable[[random.Random], None]
Torture = Callable[[Judge], None]

PROGRAM = Path(__file__).parent / "kill_program.py"
SAVE_SECONDS = 0.06  # about what a save of this program takes; kills are uniform over it
SOON_SECONDS = 300.0  # half of what the sides of a hand-off wait for each other


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("kills"), PROGRAM)
    yield server
    server.close()


class Story:
    """A directory, what happened to it in all lives so far, and the judgement."""

    def __init__(self, chance: random.Random, server: Server, folder: Path, until: int) -> None:
        self.chance, self.server, self.folder = chance, server, folder
        self.keep = chance.choice([1, 1, 2, 3])
        self.in_flight = chance.choice([1, 1, 2])
        self.told: set[int] = set()  # saves that a process knew to be published
        self.request: dict[str, Any] = {
            "seed": chance.randrange(1 << 30),
            "folder": str(folder),
            "until": until,
            "wait": chance.choice([0.0, 0.5, 1.0]),
            "again": chance.choice([0.0, 0.0, 0.5]),
        }
        ran = server.run("reference", **self.request)
        assert ran.status == 0, ran.said()
        self.right = {event["step"]: event["digest"] for event in ran.events()}

    def life(self, number: int) -> dict[str, Any]:
        chance = self.chance
        options = {
            "keep": self.keep,
            "max_in_flight": self.in_flight,
            "verify": chance.choice(["gate", "gate", "full", "read"]),
            "spare": chance.choice([None, "all", 0]),
        }
        return self.request | {
            "life": chance.randrange(1 << 30),
            "saves": 1000,
            "offload": chance.random() < 0.6,
            "schedule": chance.choice(["late", "overtake", "eager"]),
            "options": options,
        }

    def published(self) -> list[int]:
        """Lists the saves as the format's page says."""
        names = os.listdir(self.folder) if self.folder.exists() else []
        steps = {int(name[5:]) for name in names if name.startswith("step-")}
        replaced = {int(name.split("-")[1]) for name in names if name.startswith(".replaced-")}
        return sorted(steps | replaced)

    def leftovers(self) -> list[str]:
        names = os.listdir(self.folder) if self.folder.exists() else []
        known = {".lock", "latest", *(f"step-{step:08d}" for step in self.published())}
        return sorted(set(names) - known)

    def judge_log(self, running: Running, before: list[int]) -> None:
        """Compares what a process told of itself with what is right."""
        events = running.events()
        for event in events:
            kind = event["event"]
            if kind == "found":
                assert event["steps"] == before, (event, before)
            elif kind in {"moment", "restored"}:
                assert event["digest"] == self.right[event["step"]], event
            elif kind == "done":
                self.told.add(event["step"])
        restored = [event["step"] for event in events if event["event"] == "restored"]
        if restored:
            assert restored[0] == before[-1], (restored, before)

    def judge_folder(self) -> None:
        """Reads every save that counts with stock tools."""
        steps = self.published()
        newest = sorted(self.told | set(steps))[-self.keep :]
        assert set(newest) <= set(steps), (self.told, steps)
        for step in steps:
            save = self.folder / f"step-{step:08d}"
            if save.exists():
                check_format(save)
        # Those under way at the kill, one that is replaced, those being removed, one link.
        most = self.in_flight + 1 + self.in_flight + 1
        assert len(self.leftovers()) <= most, self.leftovers()

    def judge_commands(self) -> None:
        steps = self.published()
        if not steps:
            return
        ran = self.server.run("command", words=["checkpoint", "verify", str(self.folder), "--json"])
        assert ran.status == 0, ran.said()
        found = json.loads(ran.output.read_text())
        assert found["whole"] is True, found
        assert [save["step"] for save in found["saves"]] == steps

    def judge_end(self, number: int) -> None:
        """Lets a last process restore, save and end; nothing else is left."""
        before = self.published()
        request = self.life(number) | {"saves": 2}
        last = self.server.run("train", **request)
        assert last.status == 0, last.said()
        assert last.events()[-1]["event"] == "closed"
        self.judge_log(last, before)
        moments = [event["step"] for event in last.events() if event["event"] == "moment"]
        assert self.published() == sorted({*before, *moments})[-self.keep :]
        assert not self.leftovers()
        assert os.readlink(self.folder / "latest") == f"step-{moments[-1]:08d}"
        self.judge_folder()
        self.judge_commands()
        ran = self.server.run(
            "command", words=["checkpoint", "prune", str(self.folder), "--keep", "1"]
        )
        assert ran.status == 0, ran.said()
        assert self.published() == moments[-1:]


def kill_at_a_moment(chance: random.Random, running: Running, folder: Path) -> str:
    """Kills at a random time after a random event, or as soon as the directory has changed."""
    delay = chance.choice([0.0, chance.uniform(0.0, SAVE_SECONDS), chance.uniform(0.0, 0.005)])
    count, wanted = chance.randint(1, 4), chance.randint(1, 12)
    kind = chance.choice(["names", "moment", "moment", "saved", "restoring", "found", "closing"])
    names: list[str] = []
    changes, size = -1, -1
    log = running.log
    while not running.is_over():
        if kind == "names":
            now = os.listdir(folder) if folder.exists() else []
            changes += now != names or changes < 0
            names = now
            if changes >= wanted:
                break
        elif log.exists() and log.stat().st_size != size:
            size = log.stat().st_size
            seen = sum(event["event"] == kind for event in running.events())
            if seen >= (count if kind in {"moment", "saved"} else 1):
                break
    time.sleep(delay)
    running.send(signal.SIGKILL)
    return f"{kind} {wanted if kind == 'names' else count}, {delay:.4f} s later"


def judge_kills(chance: random.Random, server: Server, folder: Path) -> None:
    lives = chance.randint(1, 4)
    story = Story(chance, server, folder, until=6 * lives + 6)
    share = f"residency-kills-{os.getpid()}" if chance.random() < 0.3 else None
    free = set()
    for number in range(lives):
        before = story.published()
        record = folder.parent / "run.jsonl" if chance.random() < 0.2 else None
        request = story.life(number) | {
            "saves": 6,
            "share": share,
            "record": record and str(record),
        }
        running = server.start("train", **request)
        said = kill_at_a_moment(chance, running, folder)
        status = running.end()
        assert status in {0, -signal.SIGKILL}, running.said()
        try:
            story.judge_log(running, before)
            story.judge_folder()
        except BaseException as error:
            error.add_note(f"life {number}, killed after {said}; {running.events()}")
            raise
        free |= {event["free"] for event in running.events() if event["event"] == "memory"}
        if record and record.exists():
            judge_record(server, record)
        if chance.random() < 0.3:
            story.judge_commands()
    assert len(free) <= 1, free
    story.judge_end(lives)


def judge_record(server: Server, record: Path) -> None:
    """The record of a killed process has whole lines, and a report."""
    content = record.read_bytes()
    for line in content.split(b"\n")[:-1]:
        json.loads(line)
    ran = server.run("command", words=["report", str(record)])
    assert ran.status == 0 or content.count(b"\n") < 2, ran.said()
    assert "Traceback" not in ran.said()
    record.unlink()


def judge_interrupts(chance: random.Random, server: Server, folder: Path) -> None:
    story = Story(chance, server, folder, until=12)
    running = server.start("interrupted", **story.life(0))
    while not any(event["event"] == "ready" for event in running.events()):
        assert not running.is_over(0.002), running.said()
    for _ in range(chance.randint(1, 15)):
        if running.is_over(chance.choice([0.003, SAVE_SECONDS, 0.2]) * chance.random()):
            break
        running.send(signal.SIGINT)
    try:
        assert running.end() == 0, running.said()
        events = running.events()
        story.right[13] = story.right[12]  # the save after the last, of the same state
        last = events[-1]
        assert last["event"] == "closed"
        assert last["device"] == 0, last
        assert "step-00000013" in last["names"]
        for event in events:
            if event["event"] in {"moment", "restored"}:
                assert event["digest"] == story.right[event["step"]], event
    except BaseException as error:
        error.add_note(f"{running.events()}")
        raise
    story.right[13] = story.right[12]
    story.judge_folder()
    assert not story.leftovers()
    story.judge_commands()


def judge_hand_offs(chance: random.Random, server: Server, folder: Path) -> None:
    """Whichever side is killed, the other goes on at once, and with the next one."""
    story = Story(chance, server, folder, until=1)
    capacity = 64 << 20
    request = story.life(0) | {
        "capacity": capacity,
        "need": capacity - (4 << 20),
        "share": f"residency-hands-{os.getpid()}",
        "peer": str(folder.parent / "device.sock"),
    }
    sides = ["hand_over", "engine"]
    running = {side: server.start(side, **request) for side in sides}
    ended = []

    def good(side: str) -> int:
        event = "back" if side == "hand_over" else "returned"
        return sum(each["event"] == event for each in running[side].events())

    for number in range(chance.randint(1, 4) + 1):
        # Both come around twice: what is under way may still be of the one that was killed.
        end, wanted = time.monotonic() + SOON_SECONDS, {side: good(side) + 2 for side in sides}
        while any(good(side) < wanted[side] for side in sides):
            told = {side: running[side].events()[-4:] for side in sides}
            assert not any(r.is_over() for r in running.values()), [
                r.said() for r in running.values()
            ]
            assert time.monotonic() < end, (number, told)
            time.sleep(0.002)
        time.sleep(chance.uniform(0.0, 0.1))
        side = chance.choice(sides)
        running[side].send(signal.SIGKILL)
        running[side].end()
        ended.append(running[side])
        running[side] = server.start(side, **request)
    for each in running.values():
        each.send(signal.SIGKILL)
        each.end()
    for event in (event for each in (*ended, *running.values()) for event in each.events()):
        assert event.get("same", True), event
        assert event.get("whole", True), event


def in_a_folder(
    torture: Torture, root: Path, judge_in: Callable[[random.Random, Path], None]
) -> None:
    def judge(chance: random.Random) -> None:
        on_disk = root if chance.random() < 0.5 else Path("/dev/shm")
        place = on_disk / f"residency-kills-{os.getpid()}"
        place.mkdir()
        try:
            judge_in(chance, place / "saves")
        finally:
            shutil.rmtree(place)

    torture(judge)


def test_a_killed_process_leaves_whole_saves(
    torture: Torture, server: Server, tmp_path: Path
) -> None:
    in_a_folder(torture, tmp_path, lambda chance, folder: judge_kills(chance, server, folder))


def test_a_run_goes_on_through_interrupts(torture: Torture, server: Server, tmp_path: Path) -> None:
    in_a_folder(torture, tmp_path, lambda chance, folder: judge_interrupts(chance, server, folder))


def test_a_killed_side_of_a_hand_off_does_not_hold_the_other(
    torture: Torture, server: Server, tmp_path: Path
) -> None:
    in_a_folder(torture, tmp_path, lambda chance, folder: judge_hand_offs(chance, server, folder))
