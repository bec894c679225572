"""The record of a run: JSON Lines, one object a line, written as it happens.

Each line goes to the file with one ``write``, so that what was recorded is there after a kill, and
at most the last line is broken. The first line says what the file is; ``begin`` and ``end`` are the
boundaries of phases; ``close`` is there unless the process was killed, with the error that
ended the run, if one did.

An observer never breaks training: a ledger that cannot be written any more says so once, in the
log, and is silent from then on.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from residency._errors import InvalidArgumentError
from residency._memory._format import FORMAT, VERSION, may_be_replaced
from residency._memory._state import MemoryState

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
        is_shared: Whether it is the whole process's, as `residency record` asks for.
        failure: What the last line will say of the error that ended the run; None for no error.
    """

    def __init__(
        self,
        path: Path,
        *,
        peaks: str,
        ranks: Callable[[], tuple[int, int]],
        is_shared: bool,
        about: Mapping[str, str] | None = None,
    ) -> None:
        """Makes the file, with its first line.

        Args:
            path: The file of a run with one rank.
            peaks: What the first line says of peaks.
            ranks: Says which rank this is, and of how many.
            is_shared: Other processes write to the same path. The file is then made with its first
                boundary, since most processes have none, and is never one that is there.
            about: What else the first line says: the command, versions.

        Raises:
            InvalidArgumentError: The file cannot be written, or another file is there that is no
                record.
        """
        self.path = path
        self.peaks = peaks
        self._ranks = ranks
        self._about = dict(about or {})
        self.is_shared = is_shared
        self.failure: Mapping[str, str | None] | None = None
        self._started = time.perf_counter()
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._counts: dict[str, int] = {}
        self._num_visits = 0
        self._file = -1
        self._is_open = True
        if not is_shared:
            try:
                self._make_file()
            except OSError as error:
                raise InvalidArgumentError(
                    f"the record {str(self.path)!r} cannot be written: {error.strerror}."
                ) from None

    def _make_file(self) -> None:
        rank, world_size = self._ranks()
        base = self.path
        self.path = rank_path(base, rank, world_size)
        if not self.is_shared and not may_be_replaced(self.path):
            raise InvalidArgumentError(
                f"{str(self.path)!r} is there and is no record; name another file, or remove it. "
                "Nothing was changed."
            )
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        try:
            self._file = os.open(
                self.path, flags | (os.O_EXCL if self.is_shared else os.O_TRUNC), 0o644
            )
        except FileExistsError:
            # Among the processes of one rank the first has the name; its helpers say who they are.
            self.path = self.path.with_suffix(f".pid{self._pid}{base.suffix}")
            self._file = os.open(self.path, flags | os.O_EXCL, 0o644)
        header = {"kind": "header", "format": FORMAT, "version": VERSION, "peaks": self.peaks}
        header |= {"rank": rank, "world_size": world_size, "pid": self._pid, **self._about}
        passed = time.perf_counter() - self._started
        self._append({**header, "started_at": time.time() - passed, "t": 0.0})

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
        try:
            with self._lock:
                if not self._is_open:  # closed meanwhile
                    return
                if self._file < 0:
                    self._make_file()
                self._append({**line, "t": seconds})
                self._num_visits += line["kind"] == "end"
        except OSError as error:
            self._is_open = False
            _log.warning("residency stopped recording to %s: %s", self.path, str(error))

    def _append(self, line: dict[str, object]) -> None:
        data = (json.dumps(line, separators=(",", ":")) + "\n").encode()
        if os.write(self._file, data) != len(data):
            raise OSError("the line was cut short")

    def close(self, last: Mapping[str, int] | None = None) -> None:
        """Writes the last line and closes the file; doing it again does nothing.

        Args:
            last: Figures of the end. A `failure` makes the file where no boundary has made it.
        """
        if self._pid != os.getpid():  # a forked child, in which no thread gives the lock back
            self._is_open = False
            return
        with self._lock:
            if self._file >= 0 or self.failure:
                self.write({"kind": "close", **(self.failure or {}), **(last or {})})
            if self._file >= 0:
                os.close(self._file)
                self._file = -1
            self._is_open = False
