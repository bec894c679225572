"""What live tensors held at the end of the newest visits of each phase, so that growth shows.

A few numbers a phase; they name no tensor, and keep none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import pairwise

_MOST_PHASES = 256
_NUM_VISITS = 4  # three differences that are equal are no chance


class HeldHistory:
    """The bytes at the ends of visits, by the path of the phase."""

    def __init__(self) -> None:
        """Knows of none."""
        self._newest: dict[str, deque[int]] = {}
        self._counts: dict[str, int] = {}

    def note(self, path: str, num_bytes: int) -> None:
        """Takes in the end of a visit; further phases than 256 are passed over."""
        if path not in self._newest and len(self._newest) >= _MOST_PHASES:
            return
        self._newest.setdefault(path, deque(maxlen=_NUM_VISITS)).append(num_bytes)
        self._counts[path] = self._counts.get(path, 0) + 1

    def clear(self) -> None:
        """Forgets all."""
        self._newest.clear()
        self._counts.clear()

    def steady(self) -> Iterator[tuple[str, int, int]]:
        """Yields phases after which the same number of bytes was more each time: path, bytes of a
        visit, number of visits.
        """
        for path, newest in list(self._newest.items()):
            grown = {after - before for before, after in pairwise(list(newest))}
            if len(newest) == _NUM_VISITS and len(grown) == 1 and (num_bytes := grown.pop()) > 0:
                yield path, num_bytes, self._counts[path]


held_history = HeldHistory()
