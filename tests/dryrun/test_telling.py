"""What the reducer of a dry run is told: numbers that never come again, one event at a time."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dryrun.event_lists import differences, recorded

from residency._dryrun import _steering
from residency._dryrun._loops import loops
from residency._dryrun._steering import Steering
from residency._dryrun._telling import EVENTS, Telling

STEPS = 2_000

FORKED = """
import os, signal, sys, threading
from residency._dryrun._steering import Steering
from residency._dryrun._telling import Telling

telling = Telling(2)
is_held, is_over = threading.Event(), threading.Event()

def hold():
    with telling._lock:
        is_held.set()
        is_over.wait()

thread = threading.Thread(target=hold)
thread.start()
is_held.wait()
child = os.fork()
if not child:
    signal.alarm(30)  # ends it where it waits for the thread that it has not
    telling.tell(Steering.read)
    os._exit(0)
status = os.waitpid(child, 0)[1]
is_over.set()
thread.join()
sys.exit(status)
"""


class Thing:
    pass


def stepped(telling: Telling, parameter: torch.Tensor) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    telling.stepped.add(optimizer)
    telling.tell(Steering.stepped, telling.number_of(optimizer))
    return optimizer


def test_a_number_never_comes_again() -> None:
    telling = Telling(2)
    ids, numbers = set(), set()
    for _ in range(100):
        thing = Thing()
        ids.add(id(thing))
        numbers.add(telling.number_of(thing))
        assert telling.number_of(thing) in numbers
        del thing
    assert len(ids) < 100, "no address has come again"
    assert len(numbers) == 100


def test_what_is_gone_is_told_with_the_next_event_once() -> None:
    telling, thing = Telling(2), Thing()
    number = telling.number_of(thing)
    telling.tell(Steering.read)
    assert telling.state.here.gone == ()
    del thing
    telling.tell(Steering.read)
    assert telling.state.here.gone == (number,)
    telling.tell(Steering.read)
    assert telling.state.here.gone == ()


def test_an_optimizer_that_is_gone_has_made_no_step() -> None:
    telling = Telling(2)
    optimizer = stepped(telling, torch.zeros(1))
    assert [each.count for each in telling.state.seen.values()] == [1]
    del optimizer
    telling.tell(Steering.read)
    assert telling.state.seen == {}


def test_a_tensor_at_the_address_of_one_that_was_loaded_is_not_loaded() -> None:
    telling, memory = Telling(2), bytearray(64)
    for _ in loops.each(range(1)):
        telling.reach([torch.frombuffer(memory, dtype=torch.float32)])  # which is gone at once
        other = torch.frombuffer(memory, dtype=torch.float32)
        optimizer = stepped(telling, other)
        telling.tell(Steering.read)
        assert len(telling.state.loads) == 1, "no load is looked at"
        assert telling.state.here.trained == ()
        del optimizer


def test_a_load_before_the_first_step_is_known_once_it_is_trained() -> None:
    telling = Telling(2)
    for _ in loops.each(range(1)):
        parameter = torch.zeros(8)
        view = parameter.view(2, 4)
        telling.reach([parameter])
        telling.reach([view])  # another tensor, of the same bytes
        telling.reach([torch.zeros(8)])
        optimizer = stepped(telling, parameter)
        telling.tell(Steering.read)
        assert telling.state.here.trained == tuple(load for load, _ in telling.state.loads[:2])
        del optimizer


@pytest.mark.usefixtures("frequent_switches")
def test_threads_tell_one_at_a_time() -> None:
    """Autograd's threads make steps in hooks."""
    telling = Telling(0)
    things = [Thing(), Thing()]

    def step(thing: Thing) -> None:
        for _ in range(STEPS):
            telling.tell(Steering.stepping, telling.number_of(thing))
            telling.tell(Steering.stepped, telling.number_of(thing))

    threads = [threading.Thread(target=step, args=(thing,)) for thing in things]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.count for each in telling.state.seen.values()] == [STEPS, STEPS]


def test_a_forked_child_waits_for_no_thread_of_its_parent() -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKED]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


SCRIPT = """
import torch

model = torch.nn.Linear(8, 8, device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
for epoch in range(9):
    for _ in range(9):
        model(torch.ones(4, 8, device="cuda")).sum().backward()
        optimizer.step()
    torch.save(model.state_dict(), f"{epoch}.pt")
model.load_state_dict(torch.load("0.pt"))
"""


@pytest.mark.whole
def test_a_dry_run_leaves_the_list_that_is_asked_for(
    dry_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(EVENTS, "lists")  # from where the script runs
    assert dry_run(SCRIPT).answer["steps"] == 2
    assert not (tmp_path / "0.pt").exists(), "what the script saved is gone"
    (path,) = (tmp_path / "lists").iterdir()
    events = recorded(path)
    assert [each.kind for each in events.events].count("stepped") == 2
    assert [each.kind for each in events.events][-1] in ("loaded", "reached")
    assert list(differences(_steering, events)) == []
