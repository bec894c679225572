"""One thread that does what it is handed, in the order in which it was handed.

To hand an action is one call into C: an interrupt comes before it, and nothing happened, or after
it, and the thread has the action. A caller that cannot know which of the two it was hands another
action, which comes after the first and finds out. Invariant, which
``tests/checkpoint/test_background.py`` tries to break: of all threads that were ever begun for one
of these, one does the actions.

[Note: who ends the thread] ``end`` does; else the last reference to its ``Background``; else the
end of the interpreter, which waits for what was handed before.

[Note: without a thread] Once the interpreter has begun to end, nothing would end another thread,
and later versions of Python begin none. What is handed from then on, by exit handlers and by
threads that outlive the main one, is done in the call that hands it, after all that was handed
before. So it is where the system lets no thread begin.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from residency import _device
from residency._checkpoint._once import Once
from residency._registries import WeakRegistry
from residency._system import in_forked_child

Action = Callable[[], object]

_logger = logging.getLogger("residency")


class Background:
    """A thread of its own for actions that must come one after the other.

    Args:
        name: The thread's.

    Attributes:
        is_ended: Whether nothing may be handed any more.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._actions: SimpleQueue[Action | None] = SimpleQueue()
        self._is_taken = threading.Lock()  # by the thread that does the actions
        self._threads: list[threading.Thread] = []
        self._has_none = False  # no thread could be begun. [Note: without a thread]
        self._doing: int | None = None  # the thread of a caller that does actions itself
        self.is_ended = False
        weakref.finalize(self, self._actions.put, None).atexit = False
        _alive.add(self)

    def start(self) -> None:
        """Begins the thread, unless it runs; may be called again after an interrupt.

        What is handed may depend on the thread: begin it before there is anything to lose.
        """
        if self._is_taken.locked() or _interpreter.is_ending:
            return
        arguments = self._actions, self._is_taken
        thread = threading.Thread(target=_do_all, args=arguments, name=self._name)
        self._threads.append(thread)
        try:
            thread.start()
            self._has_none = False
        except RuntimeError as error:  # of the system, or of an interpreter that ends
            self._has_none = not any(each.is_alive() for each in self._threads)
            _logger.warning("%s does its work in the calls for it: %s", self._name, str(error))

    def hand(self, action: Action) -> None:
        """Queues an action, to be done after all that was handed before; start the thread first.

        [Note: without a thread]
        """
        self._actions.put(action)
        if self._is_without_thread():  # asked afterwards: what comes before the end has the thread
            self._do_the_rest()

    def drain(self) -> None:
        """Blocks until all that was handed before is done."""
        if self._threads and not self.is_ended:
            is_over: Once[bool] = Once()
            self.start()
            self.hand(lambda: is_over.set(True))
            is_over.wait()

    def end(self) -> None:
        """Ends the thread once all is done, for good; again, after an interrupt, goes on."""
        self.drain()
        self.is_ended = True
        self._actions.put(None)
        self._join()

    def is_current(self) -> bool:
        """Returns whether the calling thread is the one that does the actions."""
        return threading.current_thread() in self._threads

    def _is_without_thread(self) -> bool:
        return self._has_none or _interpreter.is_ending

    def _join(self) -> None:
        for thread in self._threads:
            if thread.ident is not None and not self.is_current():  # it was begun
                thread.join()

    def _do_the_rest(self) -> None:
        """Does in the caller what no thread does any more, once the thread has ended."""
        if self.is_current() or self._doing == threading.get_ident():
            return  # the caller is inside of an action: the loop around it goes on
        self._join()
        index = _device.current_index()
        with self._is_taken:  # of several callers, one after the other
            self._doing = threading.get_ident()
            try:
                _do_what_is_there(self._actions)
            finally:
                self._doing = None
                _device.use_index(index)


def _do_all(actions: SimpleQueue[Action | None], is_taken: threading.Lock) -> None:
    """Does actions until there is a None; leaves them to the thread that came before, if any."""
    if not is_taken.acquire(blocking=False):
        return
    try:
        while (action := actions.get()) is not None:
            _device.tolerate_captures()
            _try(action)
            del action  # the wait for the next one keeps nothing of this one
        actions.put(None)  # for a thread that was begun, too, and comes this late
    finally:
        is_taken.release()


def _do_what_is_there(actions: SimpleQueue[Action | None]) -> None:
    """Does the actions that were handed, and waits for no other."""
    with suppress(Empty):
        while True:
            action = actions.get_nowait()
            if action is not None:  # left by the end of a thread
                _try(action)
            del action


def _try(action: Action) -> None:
    try:
        action()
    except BaseException:  # an action tells its failures itself; the next ones are others'
        _logger.exception("an action in the background failed")


_alive: WeakRegistry[Background] = WeakRegistry()


class _Interpreter:
    """The state of the interpreter. [Note: without a thread]"""

    is_ending = False


_interpreter = _Interpreter()


def _end_all() -> None:
    _interpreter.is_ending = True  # first: what is handed after the None is done by the caller
    for each in _alive:
        each._actions.put(None)


# Before the interpreter waits for threads, as `concurrent.futures` has it; there is no public way,
# and `atexit` comes after that wait.
threading._register_atexit(_end_all)  # type: ignore[attr-defined]
in_forked_child(_alive.clear)  # threads stay with the parent
