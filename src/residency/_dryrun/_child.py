"""A process of a dry run: the simulator in CUDA's place from the first moment on, and books."""

from __future__ import annotations

import atexit
import faulthandler
import itertools
import json
import logging
import multiprocessing.process
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

import torch

from residency import sim
from residency._dryrun import _frameworks, _host, _ranks, _sharding
from residency._dryrun._blame import Blame
from residency._dryrun._books import KINDS, OTHER, STEP, Books
from residency._dryrun._caught import caught
from residency._dryrun._compiling import Compiling
from residency._dryrun._evidence import Evidence
from residency._dryrun._files import SEEN_BY
from residency._dryrun._flex import fuse_attention, name_captured
from residency._dryrun._growing import Growing, GrowingPasses
from residency._dryrun._histories import fill_histories
from residency._dryrun._levers import Levers
from residency._dryrun._methods import around
from residency._dryrun._owners import OwnersOfBlocks
from residency._dryrun._phases import BACKWARD, Phases
from residency._dryrun._places import place_of, place_of_now
from residency._dryrun._refusals import advice, refuse_sources
from residency._dryrun._saves import Saves
from residency._dryrun._settings import RunSettings
from residency._dryrun._stopping import Stopping
from residency._dryrun._triton import launch_nothing
from residency._dryrun._uploads import publish_nothing
from residency._dryrun._ways import Ways
from residency._dryrun._workspaces import Workspaces
from residency._errors import ResidencyError
from residency._memory import ImportWatch, measure, remedy_for
from residency._units import parse_bytes
from residency_sim import dry_run

_SECONDS_BETWEEN_LOOKS = 0.05  # at the host's memory
_LOOKS_BETWEEN_FILES = 10  # of what is known so far
_MOST_ERRORS = 5
_OF_WORKER = "Original Traceback"  # in the message of an error that a loader's worker has handed on


class _Warnings(logging.Handler):
    """The keeper of what residency itself warns of: what it could not change, for one."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f": {record.exc_info[1]!r}"
        if text not in self.texts:
            self.texts.append(text)


class Run:
    """The watch over one process and its script."""

    def __init__(self, settings: RunSettings) -> None:
        """Prepares; nothing is changed until `start`."""
        self._settings = settings
        self._owners = OwnersOfBlocks()
        self._saves = Saves(is_real=settings.is_real)
        self._evidence = Evidence(
            lambda: self._phases.name, lambda: self._saves.files, self._end_free_pass
        )
        self._phases = Phases(self._end_phase, self._evidence.note_backward)
        self._stopping = Stopping(settings.steps, self._owners.optimizers, _held)
        self._levers = Levers(settings)
        self._compiling = Compiling()
        self._blame = Blame()
        self._ways = Ways()
        self._warnings = _Warnings()
        self._first_host, self._first_mapped = _host_bytes(), _mapped_bytes()
        self._be_of_this_process()
        self._begin()

    def _be_of_this_process(self) -> None:
        """Knows nothing yet: at the start, and in a forked child, as its parent's are not its."""
        self._workspaces = Workspaces(*dry_run.cards_of_plenty())
        self._books = Books(self._take_journal)
        self._growing = Growing(self._books, lambda: self._stopping.state.steps_of_training)
        self._growing_passes = GrowingPasses(self._books)
        self._num_written = (0, 0, 0)  # of the timeline's points, marks and owners
        self._lock = threading.RLock()  # of the books
        self._ended = "running"
        self._error: str | None = None
        self._out_of_memory: list[dict[str, Any]] = []
        self._remedy: tuple[int, str] | None = None
        self._started = time.monotonic()  # which processes of one machine share
        self._most_host = 0
        self._pid = os.getpid()
        self._file = Path(self._settings.folder, f"{self._pid}.json")
        self._has_begun = False

    def _take_journal(self) -> bytes:
        journal = dry_run.take_journal()
        self._workspaces.read(journal)
        return journal

    def _begin(self) -> None:
        """Makes the process's files."""
        self._has_begun = True
        self._crash = self._file.with_suffix(".crash").open("w")

    def _follow_fork(self) -> None:
        self._be_of_this_process()
        self._evidence.begin_anew()

    def _is_watched(self) -> bool:
        """Returns whether this process has figures: a forked one from when it uses the device on.

        Most never do, as a loader's workers. One whose parent had used it may not, as on CUDA.
        """
        if not self._has_begun and not dry_run.is_in_bad_fork() and dry_run.has_context(0):
            self._begin()
            self._tell_from_now_on()
        return self._has_begun

    def start(self) -> None:
        """Watches the process from now on, to its end."""
        logging.getLogger("residency").addHandler(self._warnings)
        dry_run.keep_journal()
        dry_run.attach_observer(self._note_out_of_memory)
        self._blame.start()
        self._ways.start()
        self._owners.start()
        self._stopping.start()
        self._evidence.start()
        self._saves.start()
        self._phases.start()  # around all that is in place of a save
        _sharding.watch_buffers(self._making)
        if not self._settings.is_real:
            _host.leave_out_weights()
            refuse_sources()
            fuse_attention(self._compiling)
            launch_nothing()
            fill_histories()
        name_captured(self._compiling)
        _frameworks.change(self._settings)
        publish_nothing()
        self._levers.start()
        self._compiling.start()
        before = sys.excepthook

        @around(before)
        def hook(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            self._note_error(error.with_traceback(trace))
            if self._ended == "error" or self._settings.shows_errors:
                before(kind, error, trace)

        sys.excepthook = hook
        self._watch_processes()
        atexit.register(self._finish)
        leave = os._exit

        @around(leave)
        def leave_at_once(status: int) -> NoReturn:
            self._finish()
            leave(status)

        os._exit = leave_at_once
        os.register_at_fork(after_in_child=self._follow_fork)
        self._tell_from_now_on()

    def _tell_from_now_on(self) -> None:
        # An extension that takes a simulated address for a real one ends the process at once.
        faulthandler.enable(self._crash)
        self.write()
        threading.Thread(target=self._tell, daemon=True).start()

    def _note_error(self, error: BaseException) -> None:
        # What went wrong when enough had been seen is an empty loop's doing.
        self._ended = "stopped" if self._stopping.state.is_ending else "error"
        self._remedy = self._remedy or remedy_for(error, phase=self._phases.name)
        place, has_none = place_of(error.__traceback__), self._settings.random_weights
        what_to_do = advice(error, error.__traceback__, has_random_weights=has_none)
        what_to_do = what_to_do or self._blame.of(error, with_values=not self._settings.is_changed)
        lines = str(error).strip().splitlines() or [""]
        of_worker = f" {lines[-1]}" * any(_OF_WORKER in line for line in lines)
        self._error = f"{type(error).__name__}: {lines[0]}{of_worker}".removesuffix(": ")
        self._error += f" ({place})" * bool(place) + f". {what_to_do}" * bool(what_to_do)

    def _watch_processes(self) -> None:
        """Notes the error of a process that a script has started, which Python and torch catch."""
        processes: Any = multiprocessing.process.BaseProcess
        processes.run = self._noting_errors(processes.run)

        def watch_spawned(module: ModuleType) -> None:
            wrap = vars(module)["_wrap"]  # is pickled by its name

            @around(wrap)
            def wrapped(fn: Callable[..., object], *args: object, **options: object) -> object:
                return wrap(self._noting_errors(fn), *args, **options)

            module.__dict__["_wrap"] = wrapped

        ImportWatch({"torch.multiprocessing.spawn": watch_spawned}).start()

    def _noting_errors(self, function: Callable[..., object]) -> Callable[..., object]:
        @around(function)
        def noted(*args: object, **options: object) -> object:
            try:
                return function(*args, **options)
            except Exception as error:
                self._note_error(error)
                raise

        return noted

    def _tell(self) -> None:
        """Writes what is known now and then: the process may be killed.

        Linux keeps no peak of the memory that was asked for, so that one is looked for. A thread
        has no other way to look than to sleep in between.
        """
        written = 0
        for number in itertools.count(1):
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            self._look_at_host()
            if number % _LOOKS_BETWEEN_FILES == 0 and len(self._books.marks) != written:
                written = len(self._books.marks)
                self.write()

    def _look_at_host(self) -> None:
        asked = _host_bytes() - self._first_host
        if asked > self._most_host:  # else it is no peak, whatever is mapped
            self._most_host = max(self._most_host, asked - (_mapped_bytes() - self._first_mapped))

    def _end_phase(self, name: str) -> None:
        if not self._is_watched():
            return
        if name.endswith("load"):
            self._stopping.note_load()
        with self._lock:
            self._books.close(name, self._kinds, len(self._owners.optimizers))
        self._look_at_host()
        if name.endswith(BACKWARD):
            self._stopping.note_backward()
        with self._lock:
            self._growing.look()
            if name.endswith((BACKWARD, STEP)):
                self._growing_passes.begin_anew()

    def _end_free_pass(self) -> None:
        if self._is_watched():
            with self._lock:
                self._growing_passes.end_pass()

    def _kinds(self) -> dict[int, str]:
        return self._owners.kinds() | dict.fromkeys(dry_run.blas_workspaces(), OTHER)

    @contextmanager
    def _making(self, kind: str, blocks: Iterable[int]) -> Iterator[None]:
        with self._lock, self._books.making(kind, blocks):
            yield

    def _note_out_of_memory(self, device: int, asked: int, allowed: int, free: int) -> None:
        self._evidence.note_out_of_memory()
        if len(self._out_of_memory) >= _MOST_ERRORS:
            return
        line, operation = place_of_now()
        self._out_of_memory.append(
            {
                "phase": self._phases.name,
                "asked": asked,
                "free": free,
                "line": line,
                "operation": operation,
                "step": self._stopping.state.num_steps + 1,
            }
        )

    def _finish(self) -> None:
        if not self._is_watched():
            return
        if self._ended == "running":
            self._ended = "left" if self._stopping.state.was_left else "finished"
        try:
            self._phases.finish()
        finally:
            self.write()

    def write(self) -> None:
        """Writes what is known so far to the process's files: the figures anew, and what the
        timeline has got since to the end of its own.
        """
        with self._lock:
            books = self._books
            known: tuple[Sequence[object], ...] = (books.timeline, books.marks, books.owned)
            news = [each[num:] for each, num in zip(known, self._num_written, strict=True)]
            self._num_written = (len(books.timeline), len(books.marks), len(books.owned))
            with self._file.with_suffix(".timeline").open("a") as file:
                file.write(json.dumps(news) + "\n")
            partial = self._file.with_suffix(".partial")
            partial.write_text(json.dumps(self._found()))
            partial.replace(self._file)

    def _found(self) -> dict[str, object]:
        books, pinned = self._books, sim.pinned_memory_stats()
        return {
            "pid": self._pid,
            "started": self._started,
            "written_at": time.monotonic(),
            "argv": [*sys.argv, *self._levers.words()],
            "torch": torch.__version__,
            "ended": self._ended,
            "error": self._error,
            "caught": caught.last,
            "phase": self._phases.name,
            "steps": self._stopping.state.num_steps,
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
            "peak_reserved": max(
                (phase.peak_reserved for phase in books.phases.values()), default=0
            ),
            "out_of_memory": self._out_of_memory,
            "remedy": self._remedy,
            "growth": self._growing.found,
            "growth_of_passes": self._growing_passes.found,
            "growth_of_trainings": self._growing.of_trainings,
            "retries": measure(torch.device("cuda", 0)).num_retries,
            **self._workspaces.found(),
            "context": sim.settings()["context"],
            # At most: the two may have their peaks at different times.
            "pinned_peak": sum(pinned[f"{of}_bytes.peak"] for of in ("pinned", "registered")),
            "host_peak": max(0, self._most_host),
            "is_real": self._settings.is_real,
            "saved": self._saves.num_bytes,
            "files": self._saves.files,
            "files_seen_by": SEEN_BY,
            "is_cut": self._stopping.was_cut,
            "has_framework": self._stopping.state.has_framework,
            "left_out": self._stopping.left_out(),
            "has_compiled": dry_run.has_compiled() or self._compiling.is_used,
            "has_no_optimizer": self._stopping.state.is_by_hand,
            "has_optimizer": self._owners.has_optimizer,
            "unstepped": self._stopping.unstepped_bytes(),
            **self._evidence.found(),
            "warnings": self._warnings.texts,
            "guesses": [*self._blame.guesses(), *self._ways.branches(self._blame.places())],
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
            devices=_ranks.devices_of(settings.ranks),
        )
        if settings.others:
            sim.enable(**{**sim.settings(), "context": sim.settings()["context"] + settings.others})
    except ResidencyError as error:
        print(f"residency: the dry run cannot start: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    # The answer has a line for the one, and the other is about hooks of this package.
    for message in ("torch.compile compiles nothing", "Using `torch.compile.module.` when there"):
        warnings.filterwarnings("ignore", message=message)
    if torch.distributed.is_available() and not settings.is_real:
        _ranks.be_one_rank(settings.ranks)
    Run(settings).start()


def _held() -> int:
    if not dry_run.has_context(0):
        return 0
    # Private, as the public `memory_allocated` sorts all figures for this one: 0.3 ms a batch.
    held: int = torch._C._accelerator_getDeviceStats(0)["allocated_bytes"]["all"]["current"]
    return held


def _host_bytes() -> int:
    """Returns the host memory that this process has asked for, without the simulated device's."""
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file if line.startswith("VmData"))
    asked = parse_bytes(lines["VmData"].strip().replace(" kB", "KiB"))
    return asked - (measure(torch.device("cuda", 0)).reserved if dry_run.has_context(0) else 0)


def _mapped_bytes() -> int:
    """Returns the part of this memory that is files, as weights are mapped: tensors that are made
    of them count by themselves, and the system takes pages of a file back where it needs room.
    """
    num_bytes = 0
    with open("/proc/self/maps") as file:
        for line in file:
            addresses, kind, _, _, inode = line.split(maxsplit=5)[:5]
            if kind == "rw-p" and inode != "0":
                first, last = (int(address, 16) for address in addresses.split("-"))
                num_bytes += last - first
    return num_bytes
