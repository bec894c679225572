"""The functions that not every operating system has.

The library imports on Windows and macOS, where it was not tried with a device; what they lack is
left out or refused by name (``tests/test_systems.py``).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

from residency._errors import RefusedError


def in_forked_child(call: Callable[[], object]) -> None:
    """Registers a call that begins the life of each forked child; on Windows there is none."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)


def num_processors() -> int:
    """Returns how many processors this process may use, or how many there are."""
    ask = getattr(os, "sched_getaffinity", None)  # macOS and Windows have none
    return (os.cpu_count() or 1) if ask is None else len(ask(0))


def posix(module: str, needed_for: str) -> Any:
    """Returns a module that Python has on POSIX systems alone.

    Args:
        module: Its name.
        needed_for: What needs it, for the error.

    Raises:
        RefusedError: This system is none.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise RefusedError(
            f"{needed_for}, for which this system lacks Python's module {module}. Nothing was "
            "changed; run it on Linux, or on Windows under WSL."
        ) from None
