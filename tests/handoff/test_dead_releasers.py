"""An engine whose trainer is dead hears so at once; one whose trainer is still at work waits.

Patience is an hour where an error is to come at once: the test's own limit would end a wait.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from residency import HandOffError, hand_off, take_over
from residency._handoff import _peer
from residency._handoff._peer import Deadline, await_taker, remember_taker

pytestmark = pytest.mark.sim_device(capacity="256MiB")

MIB = 1 << 20
AN_HOUR = 3600.0
Start = Callable[..., "subprocess.Popen[bytes]"]


def refusal(path: Path, timeout: float) -> str:
    """Returns the error with which a take-over ends before its body runs."""
    with pytest.raises(HandOffError) as caught, take_over(MIB, peer=path, timeout=timeout):
        pytest.fail("the body must not run")
    return str(caught.value)


@pytest.mark.parametrize("stage", ["after it proved the bytes", "stays", "stays, and fails"])
def test_a_trainer_that_died_is_an_error_at_once_and_the_next_one_is_waited_for(
    device: torch.device, path: Path, start: Start, stage: str
) -> None:
    trainer = start("release", stage)
    with take_over(MIB, peer=path):
        if stage == "after it proved the bytes":
            trainer.wait()
    if stage == "stays":
        trainer.kill()
    trainer.communicate()
    assert refusal(path, AN_HOUR) == (
        f"Process {trainer.pid}, which handed the device over at {path} before, has ended, and no "
        "other hands it over. Start it again: the next take_over waits for it."
    )
    assert "No process hands a device over" in refusal(path, 0.01)
    start("release", "stays")
    with take_over(MIB, peer=path, timeout=AN_HOUR) as taken:
        assert taken.free >= MIB


def test_a_trainer_that_dies_while_it_is_waited_for_ends_the_wait(
    device: torch.device, path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = start("release", "stays")
    with take_over(MIB, peer=path):
        pass
    pauses: list[float] = []
    pause = Deadline.pause

    def kill_in_the_third(deadline: Deadline) -> bool:
        pauses.append(deadline.seconds)
        if len(pauses) == 3:
            trainer.kill()
        return pause(deadline)

    monkeypatch.setattr(Deadline, "pause", kill_in_the_third)
    assert "has ended, and no other hands it over" in refusal(path, AN_HOUR)
    assert pauses[:3] == [AN_HOUR] * 3


def test_a_trainer_that_is_alive_is_waited_for_and_named(
    device: torch.device, path: Path, start: Start
) -> None:
    trainer = start("release", "stays")
    with take_over(MIB, peer=path):
        pass
    for _ in range(2):
        said = refusal(path, 0.01)
        assert f"Process {trainer.pid}, which did before, is there." in said
        assert "waited 0.01 s" in said


@pytest.mark.parametrize("stage", ["stays", "does not wait"])
def test_a_trainer_that_left_in_good_order_may_be_followed_by_another(
    device: torch.device, path: Path, start: Start, stage: str
) -> None:
    trainer = start("release", stage)
    with take_over(MIB, peer=path):
        pass
    trainer.communicate()  # its input ends, and so does it
    assert trainer.returncode == 0
    assert f"No process hands a device over at {path}; waited 0.01 s" in refusal(path, 0.01)


def test_a_trainer_that_did_not_wait_for_the_engine_is_not_taken_for_dead(
    device: torch.device, path: Path
) -> None:
    is_over = threading.Event()

    def train() -> None:
        with hand_off(0, peer=path, timeout=AN_HOUR):
            pass
        is_over.set()

    trainer = threading.Thread(target=train)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_peer.Link, "receive", impatient(_peer.Link.receive))
        trainer.start()
        with take_over(MIB, peer=path, timeout=AN_HOUR):
            is_over.wait()
        trainer.join()
    assert f"No process hands a device over at {path}; waited 0.01 s" in refusal(path, 0.01)


def impatient(receive: Callable[..., object]) -> Callable[..., object]:
    """Returns a `receive` that does not wait for the word that the bytes are free again."""

    def wait(link: _peer.Link, deadline: Deadline, *, expected: str) -> object:
        patience = Deadline(0.01) if expected == "returned" else deadline
        return receive(link, patience, expected=expected)

    return wait


def test_a_trainer_that_serves_another_engine_is_not_taken_for_dead(
    device: torch.device, path: Path
) -> None:
    def train() -> None:
        for _ in range(2):
            link, _ = await_taker(path, Deadline(AN_HOUR))
            link.send(ready=MIB, pid=1)
            link.receive(Deadline(AN_HOUR), expected="returned")
            remember_taker(path, link)

    trainer = threading.Thread(target=train)
    trainer.start()
    with take_over(MIB, peer=path, timeout=AN_HOUR):
        pass
    first = _peer._releasers._links.pop(path)  # as where the next engine is another process
    with take_over(MIB, peer=path, timeout=AN_HOUR):
        pass
    trainer.join()
    _peer._releasers.add(path, first)
    assert f"No process hands a device over at {path}; waited 0.01 s" in refusal(path, 0.01)


def test_a_successor_that_hands_over_already_takes_a_dead_trainers_place(
    device: torch.device, path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_peer, "_SUCCESSOR_SECONDS", AN_HOUR)
    trainer = start("release", "stays")
    with take_over(MIB, peer=path):
        pass
    trainer.kill()
    trainer.communicate()
    start("release", "stays")
    with take_over(MIB, peer=path, timeout=AN_HOUR) as taken:
        assert taken.free >= MIB
