"""How the watch over files hears of what Python's audit events leave out, and not of itself.

Loaded by its path in processes that may never import torch: nothing but the standard library.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any


class Silence:
    """A part of this thread's work whose own events are not heard."""

    def __init__(self, local: threading.local) -> None:
        self._local = local
        self._before = False

    def __enter__(self) -> None:
        self._before = getattr(self._local, "is_silent", False)
        self._local.is_silent = True

    def __exit__(self, *error: object) -> None:
        self._local.is_silent = self._before


class Preceded:
    """A function of `os` of whose calls the watch hears first, and whether they were done.

    It is no Python function, as one would be bound where a class has it as an attribute.
    """

    def __init__(
        self,
        does: Callable[..., Any],
        before: Callable[..., Callable[[], None] | None],
        local: threading.local,
    ) -> None:
        """Takes the function, and what is called first: that may return what is called after."""
        functools.update_wrapper(self, does)
        self._does = does
        self._before = before
        self._local = local

    def __call__(self, *args: Any, **options: Any) -> Any:
        if getattr(self._local, "is_silent", False):
            return self._does(*args, **options)
        with Silence(self._local):
            after = self._before(*args, **options)
            try:
                return self._does(*args, **options)
            finally:
                if after is not None:
                    after()
