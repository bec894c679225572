"""The thread that writes saves: one, whatever interrupts its begin, and none once it has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import residency
from residency._checkpoint import _background
from residency._checkpoint._background import Background
from residency._registries import WeakRegistry


def test_an_interrupt_before_the_thread_began_leaves_one_that_is_begun_again_and_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[threading.Thread] = []

    class Interrupted(threading.Thread):
        """Is interrupted before it begins, the first time."""

        def start(self) -> None:
            begun.append(self)
            if len(begun) == 1:
                raise KeyboardInterrupt
            super().start()

    monkeypatch.setattr(_background.threading, "Thread", Interrupted)
    done: list[int] = []
    background = Background("residency-test")
    with pytest.raises(KeyboardInterrupt):
        background.start()
    background.start()
    background.hand(lambda: done.append(1))
    background.hand(lambda: done.append(2))
    background.end()
    assert done == [1, 2]
    assert len(begun) == 2
    assert not begun[1].is_alive()
    background.end()  # again, does nothing


def test_of_two_threads_that_were_begun_one_does_the_actions() -> None:
    background = Background("residency-test")
    background.start()
    background.drain()
    arguments = background._actions, background._is_taken
    late = threading.Thread(target=_background._do_all, args=arguments, daemon=True)
    late.start()
    late.join(60)  # it has nothing to do
    assert not late.is_alive()
    background.end()


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Returns what lets the interpreter end, as far as this package can tell, for this test."""
    monkeypatch.setattr(_background._interpreter, "is_ending", False)
    monkeypatch.setattr(_background, "_alive", WeakRegistry())  # of no other test
    return _background._end_all


def test_once_the_interpreter_ends_the_caller_does_what_it_hands_after_what_came_before(
    ending: Callable[[], None],
) -> None:
    done: list[tuple[int, str]] = []
    go_on = threading.Event()

    def note(number: int) -> None:
        done.append((number, threading.current_thread().name))

    background = Background("residency-test")
    background.start()
    background.hand(go_on.wait)
    background.hand(lambda: note(1))
    ending()
    late = threading.Thread(target=lambda: background.hand(lambda: note(2)), name="late")
    late.start()
    go_on.set()
    late.join(60)
    background.start()  # begins no other thread
    background.hand(lambda: note(3))
    background.drain()
    background.end()
    names = ["residency-test", "late", "MainThread"]
    assert done == [(number, name) for number, name in enumerate(names, start=1)]
    assert not any(thread.is_alive() for thread in background._threads)


def test_an_action_that_hands_another_in_the_caller_has_it_done_next(
    ending: Callable[[], None],
) -> None:
    done: list[int] = []
    background = Background("residency-test")
    ending()

    def first() -> None:
        background.hand(lambda: done.append(2))
        done.append(1)

    background.hand(first)
    assert done == [1, 2]


@pytest.mark.parametrize("num_possible", [0, 1, 2, 100])
def test_where_no_thread_can_be_begun_a_save_and_a_restore_are_made_in_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_possible: int
) -> None:
    """As where the system has no more, and in an exit handler from Python 3.12 on."""
    begun: list[threading.Thread] = []
    start = threading.Thread.start

    def start_or_fail(thread: threading.Thread) -> None:
        if len(begun) >= num_possible:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    state = {"x": torch.arange(5.0), "y": torch.ones(1 << 21)}
    with residency.Checkpointer(tmp_path) as checkpointer:
        saves = [checkpointer.save(step, state) for step in range(3)]
        assert all(save.wait().is_done() for save in saves)
    found = {"x": torch.zeros(5), "y": torch.zeros(1 << 21)}
    begun.clear()
    assert residency.Checkpointer(tmp_path).restore(found) == 2
    assert torch.equal(found["x"], state["x"])
    assert torch.equal(found["y"], state["y"])
    begun.clear()
    file = next((tmp_path / "step-00000002").glob("*y*.safetensors"))
    with file.open("r+b") as stream:
        stream.seek(-1, 2)
        stream.write(b"x")
    with pytest.raises(residency.CorruptSaveError, match=r"y\.safetensors"):
        residency.Checkpointer(tmp_path).restore(found, step=2)
