"""Writes of background threads: on a disk they take their time, in a dry run none.

This module keeps what a write saves until the next write begins, or until the main thread waits for
the writing thread or its result: as if a write took as long as there is from one save to the next.
So the device copies of a save that is under way meet those of the next one, as they do on a GPU.
"""

from __future__ import annotations

import threading
from concurrent import futures
from typing import Any

from residency._dryrun._methods import Function, put_around


class BackgroundWrites:
    """The writes that would still be under way."""

    def __init__(self) -> None:
        """Begins with none."""
        self._held: list[object] = []

    def start(self) -> None:
        """Replaces Python's waits for threads and results by ones that drop what is kept."""
        put_around(threading.Thread, "join")(self._wait)
        put_around(futures.Future, "result")(self._wait)

    def begin(self) -> None:
        """Notes that a write begins: the one before it has ended, as writers take turns."""
        if _is_in_background():
            self._held.clear()

    def end(self, saved: object) -> None:
        """Notes that all has been written, which on a disk would take longer."""
        if _is_in_background():
            self._held.append(saved)

    def _wait(self, wait: Function, *args: Any, **options: Any) -> Any:
        try:
            return wait(*args, **options)
        finally:
            if not _is_in_background():
                self._held.clear()


def _is_in_background() -> bool:
    return threading.current_thread() is not threading.main_thread()
