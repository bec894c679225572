"""What must not stay half done: an action that may run twice, run to its end."""

from __future__ import annotations

from collections.abc import Callable


def done_whole(action: Callable[[], None]) -> None:
    """Runs an action; where an exception comes in between, runs it again before that goes on.

    An interrupt comes once, so that the second run ends; a failure of the action's own comes again.
    """
    try:
        action()
    except BaseException:
        action()
        raise
