"""One thread that does what it is handed, in the order in which it was handed.

``hand`` is one call into C: an interrupt comes before it, and nothing happened, or after it, and
the thread has the action. A caller that cannot know which of the two it was hands another action,
which comes after the first and finds out. Invariant, which ``tests/checkpoint/test_background.py``
tries to break: of all threads that were ever begun for one of these, one does the actions.

[Note: who ends the thread] ``end`` does; else the last reference to its ``Background``; else the
end of the interpreter, which waits for what was handed before.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

from residency import _device
from residency._registries import WeakRegistry

Action = Callable[[], object]

_logger = logging.getLogger("residency")


class Background:
    """A thread of its own for actions that must come one after the other.

    Args:
        name: The thread's.
        first: Is called by the thread before all actions.

    Attributes:
        hand: Has an action done after all that was handed before. Begin the thread first.
        is_ended: Whether nothing may be handed any more.
    """

    def __init__(self, name: str, *, first: Action = bool) -> None:
        self._name = name
        self._first = first
        self._actions: SimpleQueue[Action | None] = SimpleQueue()
        self._is_taken = threading.Lock()  # by the thread that does the actions
        self._threads: list[threading.Thread] = []
        self.is_ended = False
        self.hand: Callable[[Action], None] = self._actions.put
        weakref.finalize(self, self._actions.put, None).atexit = False
        _alive.add(self)

    def start(self) -> None:
        """Begins the thread, unless it runs; may be called again after an interrupt.

        What is handed may depend on the thread: begin it before there is anything to lose.
        """
        if self._is_taken.locked():
            return
        arguments = self._actions, self._is_taken, self._first
        thread = threading.Thread(target=_do_all, args=arguments, name=self._name)
        self._threads.append(thread)
        thread.start()

    def drain(self) -> None:
        """Blocks until all that was handed before is done."""
        if self._threads and not self.is_ended:
            is_over = threading.Event()
            self.start()
            self.hand(is_over.set)
            is_over.wait()

    def end(self) -> None:
        """Ends the thread once all is done, for good; again, after an interrupt, goes on."""
        self.drain()
        self.is_ended = True
        self._actions.put(None)
        for thread in self._threads:
            if thread.ident is not None:  # it was begun
                thread.join()


def _do_all(actions: SimpleQueue[Action | None], is_taken: threading.Lock, first: Action) -> None:
    """Does actions until there is a None; leaves them to the thread that came before, if any."""
    if not is_taken.acquire(blocking=False):
        return
    try:
        _try(first)
        while (action := actions.get()) is not None:
            _device.tolerate_captures()
            _try(action)
            del action  # the wait for the next one keeps nothing of this one
    finally:
        is_taken.release()


def _try(action: Action) -> None:
    try:
        action()
    except BaseException:  # an action tells its failures itself; the next ones are others'
        _logger.exception("an action in the background failed")


_alive: WeakRegistry[Background] = WeakRegistry()


def _end_all() -> None:
    for each in _alive:
        each._actions.put(None)


# Before the interpreter waits for threads, as `concurrent.futures` has it; there is no public way,
# and `atexit` comes after that wait.
threading._register_atexit(_end_all)  # type: ignore[attr-defined]
os.register_at_fork(after_in_child=_alive.clear)  # threads stay with the parent
