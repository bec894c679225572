"""Reads what a run recorded, whole or broken: what can be read is kept, the rest is warned of with
its line number. Memory and time are bounded by the file's size.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from residency._errors import InvalidArgumentError
from residency._memory import LONGEST_LINE, VERSION
from residency._report._fields import CLASSES, FAILED, NewerFormatError, checked, visible

_MAX_WARNINGS = 20
_MAX_NAMES = 10
_Line = dict[str, Any]  # of the kinds that `checked` lets through


@dataclass(frozen=True, slots=True)
class Boundary:
    """The figures at one boundary of a phase.

    Attributes:
        seconds: Since the recording began.
        figures: Bytes by class, None for what is unknown; and how many allocations had failed.
    """

    seconds: float
    figures: dict[str, int | None]

    def bytes_of(self, name: str) -> int:
        """Returns the bytes of a class, 0 for one that is unknown."""
        return self.figures.get(name) or 0

    @property
    def reserved(self) -> int:
        """The bytes that torch's allocator has from the device."""
        return sum(map(self.bytes_of, ("held", "returnable", "stuck", "draining", "pooled")))


@dataclass(frozen=True, slots=True)
class RecordedVisit:
    """One run through a phase, as the file has it; what never ended has no `end`."""

    phase: str
    number: int
    thread: int
    line: int
    begin: Boundary
    end: Boundary | None = None
    peak: int = 0
    is_peak_exact: bool = False
    seconds: float = 0.0
    error: str | None = None


@dataclass(slots=True)
class RecordedRun:
    """One file's content.

    Attributes:
        path: The file.
        header: Its first line, or nothing where that cannot be read.
        visits: Phases in the order of their beginnings.
        warnings: What could not be read, and where.
        is_closed: Whether the last line is there: the process was not killed.
        error: The error that ended the run, as ``Name: message``; None where none is known.
        error_phase: The path of the phase in which it was raised; None outside of all.
        last_peak: Torch's peak register at the end; 0 where the record does not say it.
        num_failed: How many allocations had failed at the end, before and in the recording.
    """

    path: Path
    header: dict[str, Any] = field(default_factory=dict)
    visits: list[RecordedVisit] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    is_closed: bool = False
    error: str | None = None
    error_phase: str | None = None
    last_peak: int = 0
    num_failed: int = 0

    @property
    def name(self) -> str:
        """The file's name, as it may be printed."""
        return visible(self.path.name)

    @property
    def rank(self) -> int:
        """Which rank wrote the file."""
        return int(self.header.get("rank", 0))

    def boundaries(self) -> list[Boundary]:
        """Returns every boundary, in the order of time."""
        found = [at for visit in self.visits for at in (visit.begin, visit.end) if at is not None]
        return sorted(found, key=lambda boundary: boundary.seconds)


def read_runs(path: Path) -> list[RecordedRun]:
    """Reads a file, or the files of all ranks where the path is that of none of them.

    Raises:
        InvalidArgumentError: Nothing that a recording wrote is there.
    """
    if path.is_dir():
        raise InvalidArgumentError(f"{path} is a directory; expected a record such as run.jsonl.")
    files = [path] if path.exists() else _rank_files(path)
    if not files:
        raise InvalidArgumentError(
            f"{path} does not exist, nor does {path.stem}.rank0{path.suffix}; "
            "make it with: residency record -o FILE -- python train.py"
        )
    runs, foreign = _read_all(files)
    expected = max(int(run.header.get("world_size", 1)) for run in runs)
    present = {run.rank for run in runs if run.rank < expected}
    if len(present) < expected and path not in files:
        absent = (rank for rank in range(expected) if rank not in present)
        names = ", ".join(map(str, itertools.islice(absent, _MAX_NAMES)))
        more = expected - len(present) - _MAX_NAMES
        names += f" and {more} more" * (more > 0)
        runs[0].warnings.append(f"the run had {expected} ranks; no file of rank {names} is there")
    runs[0].warnings += foreign
    return runs


def _read_all(files: list[Path]) -> tuple[list[RecordedRun], list[str]]:
    """Reads files of ranks; one that is none is left out, with a warning, beside others."""
    runs: list[RecordedRun] = []
    errors: list[InvalidArgumentError] = []
    for file in files:
        try:
            runs.append(read_run(file))
        except InvalidArgumentError as error:
            errors.append(error)
    if not runs:
        raise errors[0]
    return sorted(runs, key=lambda run: run.rank), [str(error) for error in errors]


def _rank_files(path: Path) -> list[Path]:
    prefix, files = f"{path.stem}.rank", []
    for file in sorted(path.parent.glob(f"*{path.suffix}")) if path.parent.is_dir() else []:
        if file.stem.startswith(prefix) and file.stem.removeprefix(prefix).isdigit():
            files.append(file)
    return files


def read_run(path: Path) -> RecordedRun:
    """Reads one file.

    Raises:
        InvalidArgumentError: It cannot be read, not one line of it is a recording's, or a later
            version wrote it.
    """
    run = RecordedRun(path)
    open_visits: dict[tuple[str, int, int], int] = {}
    for number, line in _lines(run):
        try:
            _take(run, open_visits, number, checked(line))
        except NewerFormatError as error:
            raise InvalidArgumentError(
                f"{path}:{number} is no record that this version reads: its format has the version "
                f"{error}, and this residency knows those up to {VERSION}. Install a newer one."
            ) from None
        except (KeyError, ValueError) as error:
            _warn(run, number, f"is no line of a recording ({type(error).__name__}: {error})")
    if not run.header and not run.visits:
        said = "".join(f"\n{warning}" for warning in run.warnings[:_MAX_NAMES])
        raise InvalidArgumentError(
            f"{path} is no record: no line of it is one of a recording.{said}"
        )
    for index in open_visits.values():
        visit = run.visits[index]
        _warn(run, visit.line, f"phase {visit.phase!r} begins and never ends")
    if not run.is_closed:
        run.warnings.append(f"{run.name}: the recording was cut off: the last line is missing")
    return run


def _lines(run: RecordedRun) -> Iterator[tuple[int, dict[str, object]]]:
    try:
        with run.path.open("rb") as content:
            for number in itertools.count(1):
                raw = content.readline(LONGEST_LINE)
                if not raw:
                    return
                if len(raw) == LONGEST_LINE and not raw.endswith(b"\n"):
                    _warn(run, number, f"is longer than {LONGEST_LINE:,} bytes")
                    if number == 1:
                        return  # no record at all; it may have no end
                    while raw and not raw.endswith(b"\n"):
                        raw = content.readline(LONGEST_LINE)
                elif raw.strip():
                    line = _parsed(run, number, raw)
                    if line is not None:
                        yield number, line
    except OSError as error:
        raise InvalidArgumentError(f"{run.path} cannot be read: {error.strerror}.") from None


def _parsed(run: RecordedRun, number: int, raw: bytes) -> dict[str, object] | None:
    try:
        line = json.loads(raw)
    except RecursionError:
        _warn(run, number, "is broken: nested too deep")
        return None
    except ValueError:
        _warn(run, number, "is broken: not JSON")
        return None
    if not isinstance(line, dict):
        _warn(run, number, "is no line of a recording")
        return None
    return line


def _warn(run: RecordedRun, number: int, text: str) -> None:
    if len(run.warnings) < _MAX_WARNINGS:
        run.warnings.append(f"{run.name}:{number}: {text}")
    elif len(run.warnings) == _MAX_WARNINGS:
        run.warnings.append(f"{run.name}: more lines like these")


def _take(
    run: RecordedRun, open_visits: dict[tuple[str, int, int], int], number: int, line: _Line
) -> None:
    kind = line["kind"]
    if kind == "header":
        if run.header:
            raise ValueError("a second header")
        run.header = line
    elif kind == "close":
        run.is_closed = True
        run.error, run.error_phase = line["error"], line["phase"]
        run.last_peak, run.num_failed = line["peak"], line[FAILED]
    elif kind == "begin":
        key = _key(line)
        if key in open_visits:
            raise ValueError(f"phase {key[0]!r} begins twice")
        open_visits[key] = len(run.visits)
        run.visits.append(RecordedVisit(*key, line=number, begin=_boundary(line)))
    else:
        key = _key(line)
        index = open_visits.get(key)
        if index is None:
            raise ValueError(f"phase {key[0]!r} ends and never began")
        run.visits[index] = RecordedVisit(
            *key,
            line=run.visits[index].line,
            begin=run.visits[index].begin,
            end=_boundary(line),
            peak=line["peak"],
            is_peak_exact=line["is_peak_exact"],
            seconds=line["seconds"],
            error=line["error"],
        )
        del open_visits[key]


def _key(line: _Line) -> tuple[str, int, int]:
    return line["phase"], line["visit"], line["thread"]


def _boundary(line: _Line) -> Boundary:
    return Boundary(line["t"], {name: line[name] for name in (*CLASSES, "capacity", FAILED)})
