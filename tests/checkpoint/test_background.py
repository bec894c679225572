"""The thread that writes saves: one, whatever interrupts its begin, and none once it has ended."""

from __future__ import annotations

import threading

import pytest

from residency._checkpoint import _background
from residency._checkpoint._background import Background


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
    arguments = background._actions, background._is_taken, bool
    late = threading.Thread(target=_background._do_all, args=arguments, daemon=True)
    late.start()
    late.join(60)  # it has nothing to do
    assert not late.is_alive()
    background.end()
