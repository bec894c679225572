"""Writes of frameworks' checkpoints, asked for inside of other calls and while the process ends."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from residency._checkpoint import Once, _background
from residency._registries import WeakRegistry
from residency.integrations._common._ordered_writes import OrderedWrites


def held(writes: OrderedWrites, path: str, done: list[str]) -> Callable[[], None]:
    """Asks for a write that waits until it is let go."""
    let_go = threading.Event()

    def action() -> None:
        let_go.wait()
        done.append(path)

    writes.write(path, action)
    return let_go.set


def test_a_handler_that_makes_room_and_writes_while_the_call_around_it_waits_for_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    writes = OrderedWrites(1)
    let_go = held(writes, "first", done)
    wait = Once.wait
    handlers: list[Callable[[], None]] = []

    def wait_after_a_handler(self: Once[object], seconds: float | None = None) -> object:
        if handlers and threading.current_thread() is threading.main_thread():
            handlers.pop()()
        return wait(self, seconds)

    def handle() -> None:
        let_go()
        writes.make_room()
        writes.write("inner", lambda: done.append("inner"))

    monkeypatch.setattr(Once, "wait", wait_after_a_handler)
    handlers.append(handle)
    writes.make_room()
    writes.write("outer", lambda: done.append("outer"))
    writes.close()
    assert done == ["first", "inner", "outer"]


def test_which_writes_are_pending_is_known_by_their_paths() -> None:
    done: list[str] = []
    writes = OrderedWrites(2)
    let_go = held(writes, "a", done)
    assert writes.is_pending("a")
    assert not writes.is_pending("b")
    assert not writes.is_current()
    asked: list[bool] = []
    writes.remove("b", lambda: asked.append(writes.is_current()))
    let_go()
    writes.wait()
    assert not writes.is_pending("a")
    assert asked == [True]
    writes.close()


@pytest.mark.parametrize("is_used", [False, True])
def test_once_the_interpreter_ends_a_write_is_over_when_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, is_used: bool
) -> None:
    monkeypatch.setattr(_background, "_alive", WeakRegistry())  # of no other test
    done: list[str] = []
    writes = OrderedWrites(1)
    if is_used:
        writes.write("before", lambda: done.append("before"))
        writes.wait()
        done.clear()
    monkeypatch.setattr(_background._interpreter, "is_ending", False)
    _background._end_all()
    for name in ("a", "b"):
        writes.make_room()
        writes.write(name, lambda name=name: done.append(name))
        assert done[-1] == name
    writes.remove("c", lambda: done.append("c"))
    writes.close()
    assert done == ["a", "b", "c"]
