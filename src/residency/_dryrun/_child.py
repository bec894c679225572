"""A process of a dry run: the simulator in CUDA's place from the first moment on, and books."""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch

from residency import sim
from residency._dryrun import _frameworks, _host, _ranks
from residency._dryrun._books import KINDS, Books
from residency._dryrun._levers import Levers
from residency._dryrun._owners import OwnersOfBlocks
from residency._dryrun._phases import Phases
from residency._dryrun._saves import Saves
from residency._dryrun._settings import RunSettings
from residency._dryrun._stopping import Stopping
from residency._errors import ResidencyError
from residency._memory import measure
from residency._units import parse_bytes

_SECONDS_BETWEEN_FILES = 0.5  # of what is known so far
_MOST_ERRORS = 5


class Run:
    """The watch over one process and its script."""

    def __init__(self, settings: RunSettings) -> None:
        """Prepares; nothing is changed until `start`."""
        self._settings = settings
        self._core: Any = sim.core
        self._owners = OwnersOfBlocks()
        self._books = Books(self._core.take_journal)
        self._phases = Phases(self._end_phase)
        self._saves = Saves(is_real=settings.is_real)
        self._stopping = Stopping(settings.steps)
        self._levers = Levers(settings)
        self._has_news = False
        self._lock = threading.RLock()  # of the books
        self._ended = "running"
        self._error: str | None = None
        self._out_of_memory: list[dict[str, Any]] = []
        self._first_host = _host_bytes()
        self._most_host = 0
        self._pid = os.getpid()

    def start(self) -> None:
        """Watches the process from now on, to its end."""
        self._core.keep_journal(True)
        self._core.attach_observer(self._note_out_of_memory)
        self._stopping.start()
        self._phases.start()
        self._saves.start()
        if not self._settings.is_real:
            _host.leave_out_weights()
        _frameworks.change(self._settings)
        self._levers.start()
        before = sys.excepthook

        def hook(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            # What went wrong when enough had been seen is an empty loop's doing.
            self._ended = "stopped" if self._stopping.is_ending else "error"
            where = traceback.extract_tb(trace)
            place = _script_line([(each.filename, each.lineno or 0) for each in where])
            self._error = f"{kind.__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            self._error += f" ({place})" if place else ""
            if self._ended == "error" or self._settings.shows_errors:
                before(kind, error, trace)

        sys.excepthook = hook
        atexit.register(self._finish)
        leave = os._exit

        def leave_at_once(status: int) -> NoReturn:
            self._finish()
            leave(status)

        os._exit = leave_at_once
        threading.Thread(target=self._tell, daemon=True).start()

    def _tell(self) -> None:
        """Writes what is known now and then: the process may be killed."""
        while True:
            time.sleep(_SECONDS_BETWEEN_FILES)
            if self._has_news:
                self._has_news = False
                self.write()

    def _end_phase(self, name: str) -> None:
        if os.getpid() != self._pid:
            return  # a forked child has no device
        if name.endswith("load"):
            self._stopping.resume()
        with self._lock:
            self._books.close(name, self._kinds)
        self._most_host = max(self._most_host, _host_bytes() - self._first_host)
        self._has_news = True

    def _kinds(self) -> dict[int, str]:
        self._owners.look()
        return self._owners.kinds()

    def _note_out_of_memory(self, device: int, asked: int, allowed: int, free: int) -> None:
        if len(self._out_of_memory) >= _MOST_ERRORS:
            return
        frames = _frames_of_script()
        self._out_of_memory.append(
            {
                "phase": self._phases.name,
                "asked": asked,
                "free": free,
                "line": _script_line(frames[0]),
                "operation": frames[1],
                "step": self._stopping.num_steps + 1,
            }
        )

    def _finish(self) -> None:
        if os.getpid() != self._pid:
            return
        if self._ended == "running":
            self._ended = "left" if self._stopping.was_left else "finished"
        try:
            self._phases.finish()
        finally:
            self.write()

    def write(self) -> None:
        """Writes what is known so far to the process's file."""
        with self._lock:
            text = json.dumps(self._found())
        path = Path(self._settings.folder, f"{self._pid}.json")
        partial = path.with_suffix(f".{threading.get_ident()}")
        partial.write_text(text)
        partial.replace(path)

    def _found(self) -> dict[str, object]:
        books = self._books
        return {
            "pid": self._pid,
            "argv": sys.argv,
            "torch": torch.__version__,
            "ended": self._ended,
            "error": self._error,
            "phase": self._phases.name,
            "steps": self._stopping.num_steps,
            "kinds": list(KINDS),
            "phases": [
                {
                    "name": phase.name,
                    "visits": phase.visits,
                    "peak_allocated": phase.peak_allocated,
                    "peak_reserved": phase.peak_reserved,
                    "at_peak": phase.at_peak,
                }
                for phase in books.phases.values()
            ],
            "timeline": books.timeline,
            "marks": books.marks,
            "out_of_memory": self._out_of_memory,
            "retries": measure(torch.device("cuda", 0)).num_retries,
            "context": sim.settings()["context"],
            "pinned_peak": sim.pinned_memory_stats()["pinned_bytes.peak"],
            "host_peak": max(0, self._most_host),
            "saved": self._saves.num_bytes,
            "files": self._saves.files,
            **self._levers.found(),
        }


def start_child() -> None:
    """Starts the dry run of this process, as the environment says, or ends the process."""
    settings = RunSettings.of(os.environ)
    try:
        sim.enable(
            settings.capacity,
            device="cuda",
            gpu=settings.gpu,
            dry=not settings.is_real,
            schedule="eager",
        )
        if settings.others:
            sim.enable(**{**sim.settings(), "context": sim.settings()["context"] + settings.others})
    except ResidencyError as error:
        print(f"residency: the dry run cannot start: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    # Torch warns once for each operation that its own CPU kernels do in another order.
    warnings.filterwarnings("once", message="torch.compile compiles nothing")
    if torch.distributed.is_available() and not settings.is_real:
        _ranks.be_one_rank(settings.ranks)
    Run(settings).start()


def _host_bytes() -> int:
    """Returns the host memory that this process has asked for, without the simulated device's."""
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file if line.startswith("VmData"))
    asked = parse_bytes(lines["VmData"].strip().replace(" kB", "KiB"))
    return asked - (measure(torch.device("cuda", 0)).reserved if sim.core.has_context(0) else 0)


def _frames_of_script() -> tuple[list[tuple[str, int]], str]:
    """Returns the files and lines of the calls that led here, and torch's function in them.

    In a thread of autograd's no Python runs: the main thread waits in ``backward`` then.
    """
    frame: Any = sys._getframe(1)
    found: list[tuple[str, int]] = []
    operation = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if (
            not operation
            and not found
            and "residency" not in name
            and f"{os.sep}torch{os.sep}" in name
        ):
            operation = frame.f_code.co_name
        found.append((name, frame.f_lineno))
        frame = frame.f_back
    return found[::-1], operation


def _script_line(frames: list[tuple[str, int]]) -> str:
    """Returns the innermost line that is neither a library's nor ours."""
    for name, line in reversed(frames):
        if "site-packages" in name or "dist-packages" in name or name.startswith("<"):
            continue
        if name.startswith((sys.prefix, sys.base_prefix, str(Path(__file__).parents[1]))):
            continue
        return f"{os.path.relpath(name)}:{line}"
    return ""
