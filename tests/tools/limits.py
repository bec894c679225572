"""How long tests wait for another process: nearly as long as a test may take in this session.

So a machine that does other work, or a suite of few and long processes, needs one number alone:
``--timeout`` of pytest-timeout. A ``conftest.py`` may be imported before pytest is configured: it
asks for ``limits.WORKER_SECONDS`` where it waits.
"""

from __future__ import annotations

_FOR_THE_ERROR = 20.0  # of a process that is ended here, before pytest-timeout ends all
_WITHOUT_A_LIMIT = 3600.0

WORKER_SECONDS = _WITHOUT_A_LIMIT


def worker_seconds(timeout: float | None) -> float:
    """Returns how long a test waits that may take so many seconds; 0 and None are no limit."""
    return max(timeout - _FOR_THE_ERROR, timeout / 2) if timeout else _WITHOUT_A_LIMIT


def follow(timeout: float | None) -> None:
    """Sets `WORKER_SECONDS` by the limit of a test in this session."""
    global WORKER_SECONDS
    WORKER_SECONDS = worker_seconds(timeout)
