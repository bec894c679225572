"""A trainer whose engine is dead hears so at once; one whose engine is not there yet waits for it.

Patience is an hour where an error is to come at once: the test's own limit would end a wait.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import residency
from residency import HandOffError, hand_off, take_over
from residency._handoff import _peer
from residency._handoff._peer import Deadline, ask_for_device, await_taker
from residency._units import format_bytes

pytestmark = pytest.mark.sim_device(capacity="256MiB")

MIB = 1 << 20
AN_HOUR = 3600.0
Start = Callable[..., "subprocess.Popen[bytes]"]


def refusal(path: Path, timeout: float) -> str:
    """Returns the error with which a hand-off ends before its body runs."""
    with pytest.raises(HandOffError) as caught, hand_off(0, peer=path, timeout=timeout):
        pytest.fail("the body must not run")
    return str(caught.value)


@pytest.mark.parametrize("stage", ["with the bytes in hand", "stays", "stays, and fails"])
def test_an_engine_that_died_is_an_error_at_once_and_the_next_one_is_waited_for(
    device: torch.device, path: Path, start: Start, stage: str
) -> None:
    engine = start("take", stage, MIB)
    with hand_off(0, peer=path):
        pass
    if stage == "stays":
        engine.kill()
    engine.communicate()
    assert refusal(path, AN_HOUR) == (
        f"Process {engine.pid}, which had the device at {path} before, has ended, and no other "
        "asks for it. Start it again: the next hand_off waits for it."
    )
    assert "No process asked for the device" in refusal(path, 0.01)
    start("take", "stays", MIB)
    with hand_off(0, peer=path) as freed:
        assert freed.free >= MIB


def test_an_engine_that_dies_while_it_is_waited_for_ends_the_wait(
    device: torch.device, path: Path, start: Start
) -> None:
    engine = start("take", "stays", MIB)
    with hand_off(0, peer=path):
        pass
    said: list[str] = []
    trainer = threading.Thread(target=lambda: said.append(refusal(path, AN_HOUR)))
    trainer.start()
    while not path.exists():
        Deadline(1).pause()
    engine.kill()
    trainer.join()
    assert "has ended, and no other asks for it" in said[0]


def test_an_engine_that_is_alive_is_waited_for_and_named(
    device: torch.device, path: Path, start: Start
) -> None:
    engine = start("take", "stays", MIB)
    with hand_off(0, peer=path):
        pass
    for _ in range(2):
        assert f"within 0.01 s. Process {engine.pid}, which had it before, is there." in refusal(
            path, 0.01
        )


def test_an_engine_that_came_to_its_end_may_be_followed_by_another(
    device: torch.device, path: Path, start: Start
) -> None:
    engine = start("take", "stays", MIB)
    with hand_off(0, peer=path):
        pass
    engine.communicate()  # its input ends, and so does it
    assert engine.returncode == 0
    assert f"No process asked for the device at {path} within 0.01 s. Start" in refusal(path, 0.01)


def test_a_successor_that_asks_already_takes_a_dead_engines_place(
    device: torch.device, path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_peer, "_SUCCESSOR_SECONDS", AN_HOUR)
    engine = start("take", "stays", MIB)
    with hand_off(0, peer=path):
        pass
    engine.kill()
    engine.communicate()

    def follow() -> None:
        link = ask_for_device(path, MIB, Deadline(AN_HOUR))
        link.receive(Deadline(AN_HOUR), expected="ready")
        link.send(returned=True)  # as an older version does, which does not stay
        link.close()

    successor = threading.Thread(target=follow)
    successor.start()
    with hand_off(0, peer=path, timeout=AN_HOUR) as freed:
        assert freed.free >= MIB
    successor.join()
    assert _peer._takers.get(path) is None


def test_a_look_at_the_other_side_does_not_wait_for_its_word(path: Path) -> None:
    def ask() -> None:
        link = ask_for_device(path, 1, Deadline(AN_HOUR))
        link.receive(Deadline(AN_HOUR), expected="ready")
        link.close()

    asked = threading.Thread(target=ask)
    asked.start()
    link, _ = await_taker(path, Deadline(AN_HOUR))
    link.check()
    link.send(ready=1)
    asked.join()
    with pytest.raises(HandOffError, match="has ended, or left"):
        link.receive(Deadline(AN_HOUR), expected="returned")
    with pytest.raises(HandOffError, match="has ended, or left"):
        link.check()
    link.close()


def test_a_taker_gets_its_figures_and_takes_over_again_and_again(
    device: torch.device, path: Path
) -> None:
    held = [torch.ones(100 * MIB, dtype=torch.uint8, device=device)]
    capacity = residency.memory_state(device).capacity
    found: list[residency.types.TakenOver] = []

    def hand_over() -> None:
        for _ in range(3):
            with hand_off(0, peer=path):
                pass

    trainer = threading.Thread(target=hand_over)
    held.clear()  # 100 MiB are in the cache: not free, and given back when somebody asks
    before = residency.memory_state(device).free
    trainer.start()
    for _ in range(3):
        with take_over(before + 50 * MIB, peer=path) as taken:
            found.append(taken)
    trainer.join()
    first = found[0]
    assert (first.need, first.device, first.capacity) == (before + 50 * MIB, str(device), capacity)
    assert first.free_before == before
    assert first.free == before + 100 * MIB
    assert first.seconds > 0
    assert [taken.free - taken.free_before for taken in found] == [100 * MIB, 0, 0]
    assert str(first) == (
        f"{format_bytes(first.free)} of {format_bytes(capacity)} are free on {device}; "
        f"{format_bytes(first.need)} were asked for, when {format_bytes(before)} were free, "
        f"{first.seconds:.2f} s ago"
    )
