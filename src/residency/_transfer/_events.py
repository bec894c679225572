"""Events, recorded again and again: which may be recorded anew, and how the host waits for one.

Invariant, which ``tests/transfer/test_events.py`` tries to break: an event to which there is a
reference is never recorded anew.
"""

from __future__ import annotations

import sys
import time
from collections import deque

import torch


def new_event(device: torch.device, *, timed: bool = False) -> torch.Event:
    """Returns an event to record: one without references, or a new one.

    A wait on the device takes an event as it was recorded last when the wait was issued, whatever
    is recorded later (CUDA's runtime API, ``cudaStreamWaitEvent`` and ``cudaEventRecord``), so only
    references tell whether one is in use.

    Args:
        device: The accelerator whose streams record it.
        timed: Whether it can be asked for the time to another one, which costs the device more.
    """
    pool = _events.setdefault((device, timed), deque())
    for _ in range(_MOST_LOOKS):
        event = _take_oldest(pool)
        if event is not None:
            break
    else:
        event = _make_event(device, timed=timed)
    pool.append(event)
    return event


def wait_asleep(event: torch.Event) -> None:
    """Blocks the host until an event is done, and sleeps meanwhile, a millisecond at most at once.

    ``synchronize`` keeps a core busy until then: CUDA's does unless an event is made to block
    (``cudaEventSynchronize``), which torch's own cannot be.
    """
    seconds = _FIRST_SLEEP_SECONDS
    while not event.query():
        time.sleep(seconds)
        seconds = min(2 * seconds, _LONGEST_SLEEP_SECONDS)


def seconds_between(start: torch.Event, end: torch.Event) -> float:
    """Returns the device's time from one timed event to a later one; blocks the host until then."""
    end.synchronize()  # before it there is no time to ask for
    return max(start.elapsed_time(end), 0.0) / 1e3


def _make_event(device: torch.device, *, timed: bool) -> torch.Event:
    return torch.Event(device.type, enable_timing=timed)


def _take_oldest(pool: deque[torch.Event]) -> torch.Event | None:
    """Takes the event that was taken longest ago out of the pool, or puts it last if it is in use.

    It is out of the pool while its references are counted: no other thread finds it then.
    """
    try:
        event = pool.popleft()
    except IndexError:
        return None
    if sys.getrefcount(event) == _REFERENCES_OF_ONE:
        return event
    pool.append(event)
    return None


def _references_of_one() -> int:
    event = object()
    return sys.getrefcount(event)  # its argument may count as one, as it did before Python 3.14


_FIRST_SLEEP_SECONDS = 3e-5
_LONGEST_SLEEP_SECONDS = 1e-3
_MOST_LOOKS = 16  # as long as an event takes to make
_REFERENCES_OF_ONE = _references_of_one()
_events: dict[tuple[torch.device, bool], deque[torch.Event]] = {}
