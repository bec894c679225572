"""Reads what a run recorded, whole or broken: what can be read is kept, the rest is warned of with
its line number.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from residency._errors import InvalidArgumentError
from residency._memory._format import FORMAT, VERSION

CLASSES = ("held", "returnable", "stuck", "draining", "pooled", "outside", "free")
_MAX_WARNINGS = 20


@dataclass(frozen=True, slots=True)
class Boundary:
    """The figures at one boundary of a phase.

    Attributes:
        seconds: Since the recording began.
        figures: Bytes by class; None for what is unknown.
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
class Run:
    """One file's content.

    Attributes:
        path: The file.
        header: Its first line.
        visits: Phases in the order of their beginnings.
        warnings: What could not be read, and where.
        is_closed: Whether the run ended in order.
    """

    path: Path
    header: dict[str, Any] = field(default_factory=dict)
    visits: list[RecordedVisit] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    is_closed: bool = False

    @property
    def rank(self) -> int:
        """Which rank wrote the file."""
        return int(self.header.get("rank", 0))

    def boundaries(self) -> list[Boundary]:
        """Returns every boundary, in the order of time."""
        found = [at for visit in self.visits for at in (visit.begin, visit.end) if at is not None]
        return sorted(found, key=lambda boundary: boundary.seconds)


def read_runs(path: Path) -> list[Run]:
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
    runs = sorted((read_run(file) for file in files), key=lambda run: run.rank)
    expected = max(int(run.header.get("world_size", 1)) for run in runs)
    missing = sorted(set(range(expected)) - {run.rank for run in runs})
    if missing and path not in files:
        names = ", ".join(map(str, missing))
        runs[0].warnings.append(f"the run had {expected} ranks; no file of rank {names} is there")
    return runs


def _rank_files(path: Path) -> list[Path]:
    prefix, files = f"{path.stem}.rank", []
    for file in sorted(path.parent.glob(f"*{path.suffix}")) if path.parent.is_dir() else []:
        if file.stem.startswith(prefix) and file.stem.removeprefix(prefix).isdigit():
            files.append(file)
    return files


def read_run(path: Path) -> Run:
    """Reads one file.

    Raises:
        InvalidArgumentError: It cannot be read, or not one line of it is a recording's.
    """
    run = Run(path)
    open_visits: dict[tuple[str, int, int], int] = {}
    for number, line in _lines(run):
        try:
            _take(run, open_visits, number, line)
        except (KeyError, TypeError, ValueError) as error:
            _warn(run, number, f"is no line of a recording ({type(error).__name__}: {error})")
    if not run.header and not run.visits:
        raise InvalidArgumentError(f"{path} is no record: no line of it is one of a recording.")
    for index in open_visits.values():
        visit = run.visits[index]
        _warn(run, visit.line, f"phase {visit.phase!r} begins and never ends")
    if not run.is_closed:
        run.warnings.append(f"{path.name}: the recording was cut off: the last line is missing")
    return run


def _lines(run: Run) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        text = run.path.read_bytes()
    except OSError as error:
        raise InvalidArgumentError(f"{run.path} cannot be read: {error.strerror}.") from None
    for number, raw in enumerate(text.splitlines(), start=1):
        if not raw.strip():
            continue
        try:
            line = json.loads(raw)
        except ValueError:
            _warn(run, number, "is broken: not JSON")
            continue
        if isinstance(line, dict):
            yield number, line
        else:
            _warn(run, number, "is no line of a recording")


def _warn(run: Run, number: int, text: str) -> None:
    if len(run.warnings) < _MAX_WARNINGS:
        run.warnings.append(f"{run.path.name}:{number}: {text}")
    elif len(run.warnings) == _MAX_WARNINGS:
        run.warnings.append(f"{run.path.name}: more lines like these")


def _take(
    run: Run, open_visits: dict[tuple[str, int, int], int], number: int, line: dict[str, Any]
) -> None:
    kind = line["kind"]
    if kind == "header":
        if line["format"] != FORMAT or line["version"] > VERSION:
            raise ValueError(f"format {line['format']!r}, version {line['version']!r}")
        run.header = line
    elif kind == "close":
        run.is_closed = True
    elif kind == "begin":
        key = _key(line)
        open_visits[key] = len(run.visits)
        run.visits.append(RecordedVisit(*key, line=number, begin=_boundary(line)))
    elif kind == "end":
        key = _key(line)
        index = open_visits.get(key)
        if index is None:
            raise ValueError(f"phase {key[0]!r} ends and never began")
        run.visits[index] = RecordedVisit(
            *key,
            line=run.visits[index].line,
            begin=run.visits[index].begin,
            end=_boundary(line),
            peak=int(line["peak"]),
            is_peak_exact=bool(line["is_peak_exact"]),
            seconds=float(line["seconds"]),
            error=line["error"],
        )
        del open_visits[key]
    else:
        raise ValueError(f"kind {kind!r}")


def _key(line: dict[str, Any]) -> tuple[str, int, int]:
    return str(line["phase"]), int(line["visit"]), int(line["thread"])


def _boundary(line: dict[str, Any]) -> Boundary:
    sizes = {name: line[name] for name in (*CLASSES, "capacity")}
    return Boundary(float(line["t"]), {k: None if v is None else int(v) for k, v in sizes.items()})
