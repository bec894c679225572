"""Signal handlers save in the midst of a save, and programs save while they end: nothing is lost.

Each round is a process of its own, forked from a warm one (``signal_program.py``). What a call
returned as a save is there with its own bytes, or the call was refused by name; nothing else is
raised, and nothing hangs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from limits import WORKER_SECONDS
from warm_process import Server

import residency

Judge = Callable[[random.Random], None]
Torture = Callable[[Judge], None]

PROGRAM = Path(__file__).parent / "signal_program.py"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("signals"), PROGRAM)
    yield server
    server.close()


def options_of(chance: random.Random) -> dict[str, Any]:
    return {
        "max_in_flight": chance.choice([1, 2]),
        "policy": chance.choice(["wait", "wait", "replace", "skip"]),
        "verify": chance.choice(["gate", "full", "read"]),
    }


def judge_handlers(chance: random.Random, server: Server, folder: Path) -> None:
    ran = server.run(
        "handled",
        life=chance.randrange(1 << 30),
        folder=str(folder),
        offload=chance.random() < 0.3,
        schedule=chance.choice(["late", "overtake", "eager"]),
        options=options_of(chance),
        saves=60,
        patience=WORKER_SECONDS,
    )
    assert ran.status == 0, ran.said()
    (told,) = ran.events()
    assert told["rung"] > 0, told


def judge_endings(chance: random.Random, server: Server, folder: Path) -> None:
    places = ["before", "exit", "exit", "threading", "thread", "thread"]
    saves = [(chance.choice(places), chance.random() < 0.5) for _ in range(chance.randint(1, 5))]
    ran = server.run(
        "ending",
        folder=str(folder),
        options=options_of(chance) | {"policy": "wait"},
        saves=saves,
        close=chance.random() < 0.3,
        delay=chance.choice([0.0, 0.0, 0.01, 0.1]),
        patience=WORKER_SECONDS,
    )
    assert ran.status == 0, (saves, ran.said())
    told = [event["step"] for event in ran.events() if event["event"] == "saved"]
    reader = residency.Checkpointer(folder)
    assert reader.steps() == sorted(told), (saves, ran.said())
    if "Traceback" in ran.said():  # of those after `close`
        assert "is closed; make another one" in ran.said(), (saves, ran.said())
    else:
        assert len(told) == len(saves), (saves, ran.said())
    for step in told:
        mark = torch.zeros(50)
        reader.restore({"mark": mark}, step=step, rng=False)
        assert bool((mark == step).all()), (saves, step)


def in_new_folders(
    torture: Torture, root: Path, judge_in: Callable[[random.Random, Path], None]
) -> None:
    count = 0

    def judge(chance: random.Random) -> None:
        nonlocal count
        count += 1
        judge_in(chance, root / str(count))

    torture(judge)


def test_handlers_that_save_lose_nothing(torture: Torture, server: Server, tmp_path: Path) -> None:
    in_new_folders(torture, tmp_path, lambda chance, at: judge_handlers(chance, server, at))


def test_saves_at_the_end_are_made_or_refused(
    torture: Torture, server: Server, tmp_path: Path
) -> None:
    in_new_folders(torture, tmp_path, lambda chance, at: judge_endings(chance, server, at))
