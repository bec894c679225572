"""The record of a run: JSON Lines, one object a line, written as it happens.

Each line goes to the file with one ``write``, so that what was recorded is there after a kill, and
at most the last line is broken. The first line says what the file is; ``begin`` and ``end`` are the
boundaries of phases; ``close`` is there if the run ended in order.

An observer never breaks training: a ledger that cannot be written any more says so once, in the
log, and is silent from then on.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

from residency._errors import InvalidArgumentError
from residency._memory._state import MemoryState

FORMAT = "residency-ledger"
VERSION = 1
_FIGURES = (*MemoryState.__dataclass_fields__,)
# Of no use at a boundary, or said elsewhere in the line.
_LEFT_OUT = frozenset({"device", "notes", "peak_held", "peak_reserved", "is_returnable_exact"})
_log = logging.getLogger("residency")


def figures(state: MemoryState) -> dict[str, Any]:
    """Returns a state's figures as a line has them."""
    return {name: getattr(state, name) for name in _FIGURES if name not in _LEFT_OUT}


def rank_path(path: Path, rank: int, world_size: int) -> Path:
    """Returns the file of one rank: the path itself when there is one rank."""
    return path if world_size == 1 else path.with_suffix(f".rank{rank}{path.suffix}")


class Ledger:
    """The file that a recording writes, and how far it has come.

    Attributes:
        path: The file of this process.
        peaks: ``"bounds"`` or ``"exact"``: whether torch's peak register is left alone.
    """

    def __init__(self, path: Path, *, peaks: str, rank: int = 0, world_size: int = 1) -> None:
        """Makes the file, empty but for its first line.

        Raises:
            InvalidArgumentError: The file cannot be written.
        """
        self.path = path
        self.peaks = peaks
        self._started = time.perf_counter()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._num_visits = 0
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        except OSError as error:
            raise InvalidArgumentError(
                f"the record {str(path)!r} cannot be written: {error.strerror}."
            ) from None
        self._is_open = True
        header = {"kind": "header", "format": FORMAT, "version": VERSION, "peaks": peaks}
        header |= {"rank": rank, "world_size": world_size, "pid": self._pid}
        self.write({**header, "started_at": time.time()})

    @property
    def num_visits(self) -> int:
        """How many phases have ended so far."""
        return self._num_visits

    @property
    def is_writing(self) -> bool:
        """Whether lines still reach the file: not after an error, nor in a forked child."""
        return self._is_open and self._pid == os.getpid()

    def count_visit(self, path: str) -> int:
        """Returns the number of this visit of a phase, from 0."""
        with self._lock:
            number = self._counts.get(path, 0)
            self._counts[path] = number + 1
        return number

    def write(self, line: dict[str, Any]) -> None:
        """Appends one line; an error ends the recording, not the run."""
        if not self.is_writing:
            return
        seconds = round(time.perf_counter() - self._started, 6)
        data = (json.dumps({**line, "t": seconds}, separators=(",", ":")) + "\n").encode()
        try:
            with self._lock:
                if os.write(self._file, data) != len(data):
                    raise OSError("the line was cut short")
                self._num_visits += line["kind"] == "end"
        except OSError as error:
            self._is_open = False
            _log.warning("residency stopped recording to %s: %s", self.path, error)

    def close(self) -> None:
        """Writes the last line and closes the file; doing it again does nothing."""
        self.write({"kind": "close"})
        if self._pid == os.getpid() and self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._is_open = False
