"""Begins threads, of which the system may give fewer than are asked for, or none."""

from __future__ import annotations

import threading
from collections.abc import Sequence


def begin(threads: Sequence[threading.Thread]) -> int:
    """Begins threads; returns how many could be: none, as a rule, while the interpreter ends."""
    for begun, thread in enumerate(threads):
        try:
            thread.start()
        except RuntimeError:
            return begun
    return len(threads)
