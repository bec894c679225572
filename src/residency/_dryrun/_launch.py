"""Runs a command as a dry run: a child process, what it found, and how far it is."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import residency_sim
from residency._commands import start_command
from residency._dryrun._children import not_isolated
from residency._dryrun._places import is_script
from residency._dryrun._refusals import OF_CRASH
from residency._dryrun._settings import RunSettings
from residency._dryrun._strays import end_strays
from residency._dryrun._undo import files_put_back
from residency._dryrun._verdict import went_on
from residency._errors import InvalidArgumentError, ResidencyError
from residency._units import format_bytes

_SECONDS_BETWEEN_LOOKS = 0.5
_HIDDEN = (
    "CUDA_VISIBLE_DEVICES hides every GPU, so that on a machine with one the script would find "
    "none; the dry run has left that out"
)
_SECONDS_TO_END = 10.0  # of a child that was interrupted, before it is killed


class NoAnswerError(ResidencyError):
    """An error for a command that ended without an answer."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command and how it is run.

    Attributes:
        words: The program and its arguments.
        settings: How it is run; the folder is made by `dry_run`.
        is_quiet: Whether the script's own output is thrown away.
        site: The folder whose ``sitecustomize`` starts the child.
        progress: Where a line says how far the run is; None for nowhere.
        tries: What the run tries, for that line.
        is_searching: Whether other runs follow, which are to find the files that this one found.
        has_room: Whether the device holds everything, so that what needs most is asked about.
    """

    words: Sequence[str]
    settings: RunSettings
    site: Path
    is_quiet: bool = False
    progress: TextIO | None = None
    tries: str = ""
    is_searching: bool = False
    has_room: bool = False


def dry_run(command: Command) -> dict[str, Any]:
    """Runs a command to its end, or to Ctrl-C, and returns what its training process found.

    Raises:
        InvalidArgumentError: The command cannot be started, or would not be followed.
        NoAnswerError: No process of it has used torch, or none could start a dry run.
    """
    if not_isolated(command.words) != list(command.words):
        raise InvalidArgumentError(
            "python -I, -E and -S ignore a dry run's variables, and would really train. Nothing "
            "was run; write the command without them."
        )
    folder = tempfile.mkdtemp(prefix="residency-dry-run-")
    simulator = str(Path(str(residency_sim.__file__)).parents[1])
    settings = replace(command.settings, folder=folder, simulator=simulator)
    started = time.monotonic()
    with files_put_back(folder, has_saves=settings.is_real) as end:
        status, was_interrupted = _run(command, settings, end.descriptor)
        found = [
            each | _timeline(folder, each) | _crash(folder, each, command.is_quiet)
            for each in _read(folder)
        ]
        # One that ran out of memory is followed by one with room enough.
        end.leaves_new = not command.is_searching and not any(e["out_of_memory"] for e in found)
    if not found:
        raise NoAnswerError(
            f"the command ended with status {status}, and no Python process of it has used torch. "
            + _advice(status, is_quiet=command.is_quiet)
        )
    training = _training(found, has_room=command.has_room)
    training["others"] = _others(training, found)
    training["has_failed"] = any(each["ended"] == "error" for each in found)
    training |= {"status": status, "was_interrupted": was_interrupted, "processes": len(found)}
    training["seconds"] = time.monotonic() - started
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        training["warnings"] = [*training["warnings"], _HIDDEN]
    if training["ended"] == "finished" and status != 0 and not was_interrupted:
        training |= {"ended": "error", "error": f"an error, with status {status}"}
    return training


def _advice(status: int, *, is_quiet: bool) -> str:
    """Returns what to do about a command that has not used torch."""
    if status == 0:
        return "After -- write the command for the machine with the GPU: -- python train.py"
    if is_quiet:
        return "Run it without --quiet and --json, and it shows its own error."
    return "Its own error stands above."


def _training(found: list[dict[str, Any]], *, has_room: bool = False) -> dict[str, Any]:
    """Returns what the process that trains has found; the others are launchers and helpers.

    One that is out of memory comes first: the command does not fit then. Of those that came to
    nothing it is one that failed, and of these the one that began last: a launcher only says that
    what it started has failed.
    """

    def rank(each: dict[str, Any]) -> tuple[Any, ...]:
        if has_room:
            return each["peak_reserved"], each["steps"], each["started"]
        is_full = bool(each["out_of_memory"]) and not went_on(each)
        has_failed = each["ended"] == "error"
        return is_full, each["steps"], each["peak_reserved"], has_failed, each["started"]

    return max(found, key=rank)


def _others(training: dict[str, Any], found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns what the other processes needed that used a device, the largest first."""
    others = [
        {
            "script": os.path.basename((each["argv"] or ["-"])[0]),
            "peak_reserved": each["peak_reserved"],
            "at_once": each["started"] < training["written_at"]
            and training["started"] < each["written_at"],
        }
        for each in found
        if each is not training and each["peak_reserved"]
    ]
    return sorted(others, key=lambda each: -each["peak_reserved"])


def _run(command: Command, settings: RunSettings, until_ended: int) -> tuple[int, bool]:
    output = subprocess.DEVNULL if command.is_quiet else None
    variables = settings.variables() | {"CUDA_VISIBLE_DEVICES": ""}
    process = start_command(
        command.words,
        site=command.site,
        variables=variables,
        stdout=output,
        stderr=output,
        pass_fds=(until_ended,),
    )
    line = _ProgressLine(command.progress, settings.folder, command.tries)
    was_interrupted = False
    with process, _killed_with_us(process):
        while True:
            try:
                return process.wait(_SECONDS_BETWEEN_LOOKS), was_interrupted
            except subprocess.TimeoutExpired:
                line.show()
                end_strays(process.pid, command.site)
            except KeyboardInterrupt:  # which the child got, too
                if was_interrupted:
                    process.kill()
                was_interrupted = True
                _end(process)
            except BaseException:
                process.kill()
                raise
            finally:
                if process.returncode is not None:
                    line.clear()


@contextmanager
def _killed_with_us(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kills the child where a signal asks this process to end, from a time limit for one."""

    def end(number: int, frame: object) -> None:
        process.kill()
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        process.kill()


def _read(folder: str) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(Path(folder).glob("*.json"))]


def with_owners(timeline: list[list[int]], owned: Iterable[Sequence[int]]) -> list[list[int]]:
    """Returns a timeline in which what loads brought has its owner from the beginning.

    Args:
        timeline: As the books have it.
        owned: The same.
    """
    positions = [point[0] for point in timeline]
    # What changes from a point on, for each figure of it, so that many blocks cost one pass.
    changes: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for made, known, before, kind, num_bytes in owned:
        for position, sign in ((made, 1), (known, -1)):
            change = changes[bisect_left(positions, position)]
            change[1 + before] -= sign * num_bytes
            change[1 + kind] += sign * num_bytes
    moved: Counter[int] = Counter()
    points = []
    for index, point in enumerate(timeline):
        moved.update(changes.get(index, {}))
        points.append([number + moved[figure] for figure, number in enumerate(point)])
    return points


def _timeline(folder: str, found: dict[str, Any]) -> dict[str, object]:
    """Returns what a process has appended so far; the last line may be a part of one."""
    timeline: list[list[int]] = []
    marks: list[object] = []
    owned: list[list[int]] = []
    with Path(folder, f"{found['pid']}.timeline").open() as file:
        for line in file:
            if line.endswith("\n"):
                points, ends, owners = json.loads(line)
                timeline += points
                marks += ends
                owned += owners
    return {"timeline": with_owners(timeline, owned), "marks": marks}


def _crash(folder: str, found: dict[str, Any], is_quiet: bool) -> dict[str, object]:
    """Shows where a process has crashed, and returns it as its error; nothing of others."""
    report = Path(folder, f"{found['pid']}.crash").read_text()
    if not report:
        return {}
    if not is_quiet:
        sys.stderr.write(report)
    current = report.partition("Current thread")[2] or report
    calls = re.findall(r'File "(.+)", line (\d+)', current)
    lines = [f" ({os.path.relpath(file)}:{line})" for file, line in calls if is_script(file)]
    error = report.splitlines()[0].removeprefix("Fatal Python error: ") + "".join(lines[:1])
    return {"ended": "error", "error": f"{error}. {OF_CRASH}"}


class _ProgressLine:
    """A line on a terminal that says what is tried, and which phase the child is in."""

    def __init__(self, stream: TextIO | None, folder: str, tries: str) -> None:
        self._stream = stream if stream is not None and stream.isatty() else None
        self._folder = folder
        self._tries = tries and f"{tries}: "
        self._started = time.monotonic()
        self._is_shown = False

    def show(self) -> None:
        if self._stream is None:
            return
        found = _read(self._folder)
        text = "starting"
        if found:
            training = _training(found)
            text = f"{training['steps']} optimizer steps, after {training['phase']}, "
            text += f"peak {format_bytes(training['peak_reserved'])}"
        seconds = time.monotonic() - self._started
        line = f"residency: dry run, {seconds:.0f} s: {self._tries}{text}"
        # The last column stays free: a line that is full may have gone on to the next one.
        self._stream.write("\r\x1b[K" + line[: shutil.get_terminal_size().columns - 1])
        self._stream.flush()
        self._is_shown = True

    def clear(self) -> None:
        if self._stream is not None and self._is_shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
