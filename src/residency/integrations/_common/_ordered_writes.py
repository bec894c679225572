"""Writes and removals of checkpoints in the background: in order, bounded, failures raised once.

One thread does what is asked for in the order of the calls, on the device of each caller.
Invariant, which ``tests/integrations/test_lightning.py`` tries to break: at most ``max_in_flight``
writes are under way, and a failure is raised by exactly one call.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from residency import _device
from residency._checkpoint import Background, Once, check_count
from residency._errors import CheckpointError

_log = logging.getLogger("residency")


class OrderedWrites:
    """A thread that does writes and removals in their order, until ``close``."""

    def __init__(self, max_in_flight: int) -> None:
        """Starts nothing.

        Raises:
            InvalidArgumentError: The number is not a whole one of at least 1.
        """
        check_count("max_in_flight", max_in_flight)
        self.max_in_flight = max_in_flight
        self._background: Background | None = None
        # Where to, and what is set once the write is over.
        self._writes: deque[tuple[str, Once[bool]]] = deque()
        self._failures: deque[CheckpointError] = deque()
        self._num_failed = 0
        self._num_raised = 0  # of those
        self._lock = threading.RLock()  # a signal handler may come in the midst

    def make_room(self) -> None:
        """Blocks until one more write may be under way."""
        while len(pending := self._under_way()) >= self.max_in_flight:
            pending[0][1].wait()

    def is_pending(self, path: object) -> bool:
        """Returns whether a write to a path is not over."""
        return any(to == str(path) for to, _ in self._under_way())

    def is_current(self) -> bool:
        """Returns whether the calling thread is the one that writes."""
        return self._background is not None and self._background.is_current()

    def _under_way(self) -> list[tuple[str, Once[bool]]]:
        """Returns the writes that are not over, and lets go of the others, step by step: a signal
        handler that writes may come in the midst.
        """
        pending = []
        for each in self._writes.copy():
            if not each[1].value:
                pending.append(each)
            else:
                with suppress(ValueError):
                    self._writes.remove(each)
        return pending

    def write(self, path: object, action: Callable[[], object]) -> None:
        """Queues a write after all that was asked for before.

        Args:
            path: Where to, for the message of a failure.
            action: Writes. Whatever it holds is let go before its place is free.

        Raises:
            CheckpointError: An earlier one failed, and no call raised that yet; this one is queued.
        """
        failure = self._take_failure()
        index = _device.current_index()
        is_over: Once[bool] = Once()

        def run() -> None:
            nonlocal action
            try:
                _device.use_index(index)
                action()
            except BaseException as error:
                self._fail(f"the checkpoint {path} could not be written", error)
            finally:
                del action
                is_over.set(True)

        self._hand(run)
        self._writes.append((str(path), is_over))
        if failure is not None:
            raise failure

    def remove(self, path: object, action: Callable[[], object]) -> None:
        """Queues a removal after all that was asked for before.

        Nothing is removed where something before it failed and had not been raised when this was
        asked for, even if it has been by now: what was to be replaced may be all that there is.
        """
        with self._lock:
            num_raised = self._num_raised
        index = _device.current_index()

        def run() -> None:
            if self._num_failed > num_raised:  # all that was before is over, and nothing else is
                _log.warning("residency keeps %s: the write before its removal failed", path)
                return
            try:
                _device.use_index(index)
                action()
            except BaseException as error:
                self._fail(f"the checkpoint {path} could not be removed", error)

        self._hand(run)

    def wait(self) -> None:
        """Blocks until everything that was asked for is done."""
        if self._background is not None:
            self._background.drain()
        self._writes.clear()

    def raise_failure(self, *, beside: BaseException | None = None) -> None:
        """Raises the failures that no call has raised yet, if there are any.

        Args:
            beside: An error that is on its way to the caller already: it gets a note instead.

        Raises:
            CheckpointError: From what the write raised; others that failed since are its notes.
        """
        failure = self._take_failure()
        if failure is None:
            return
        if beside is None:
            raise failure
        beside.add_note(f"and {failure}")

    def close(self) -> None:
        """Ends the thread once everything is done; the next write starts another."""
        if self._background is not None:
            self._background.end()
            self._background = None
        self._writes.clear()

    def _take_failure(self) -> CheckpointError | None:
        with self._lock:
            failures = list(self._failures)
            self._failures.clear()
            self._num_raised = self._num_failed
        for other in failures[1:]:
            failures[0].add_note(f"and {other}")
        return failures[0] if failures else None

    def _hand(self, run: Callable[[], None]) -> None:
        if self._background is None or self._background.is_ended:  # by a close cut short
            self._background = Background("residency-checkpoints")
        self._background.start()
        self._background.hand(run)

    def _fail(self, what: str, error: BaseException) -> None:
        failure = CheckpointError(f"{what}: {type(error).__name__}: {error}")
        # As text: the frames of a traceback would keep the checkpoint until it is raised.
        trace = "".join(traceback.format_exception(error))
        failure.__cause__ = _without_frames(error)
        # Said at once, too: a script may end before its next call.
        _log.error("residency: %s\n%s", failure, trace)
        failure.add_note(trace)
        with self._lock:
            self._failures.append(failure)
            self._num_failed += 1


def _without_frames(error: BaseException) -> BaseException:
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__
    return error
