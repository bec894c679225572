"""A value that is set once, for which threads and signal handlers wait.

Python's ``Event`` holds a lock while it is asked: a handler that interrupts one question and waits
for what another thread is about to set would wait for ever. Here each who waits has a queue of its
own, whose methods are single calls into C, and no thread holds a lock.
"""

from __future__ import annotations

from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Once(Generic[T]):
    """A value that is there from some moment on; what is set first stays."""

    def __init__(self) -> None:
        self._found: list[T] = []
        self._waiting: list[SimpleQueue[None]] = []

    @property
    def value(self) -> T | None:
        """What was set, or None before."""
        return self._found[0] if self._found else None

    def set(self, value: T) -> None:
        """Sets the value, unless there is one, and wakes all who wait; again, wakes them again."""
        if not self._found:
            self._found.append(value)
        for each in self._waiting.copy():
            each.put(None)

    def wait(self, seconds: float | None = None) -> T | None:
        """Blocks until there is a value, for so many seconds at most; returns it, or None."""
        if not self._found:
            woken: SimpleQueue[None] = SimpleQueue()
            self._waiting.append(woken)
            try:
                if not self._found:  # who set it may have looked for waiting ones before
                    with suppress(Empty):
                        woken.get(timeout=seconds)
            finally:
                self._waiting.remove(woken)
        return self.value
