"""Files for other viewers: TensorBoard's scalars, and a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from residency._errors import InvalidArgumentError
from residency._report._fields import CLASSES
from residency._report._read import RecordedRun

_MICROSECONDS = 1_000_000


def write_tensorboard(runs: list[RecordedRun], folder: Path) -> None:
    """Writes the figures at the end of every visit as scalars, over the visits of each phase.

    Raises:
        ModuleNotFoundError: TensorBoard is not installed.
        InvalidArgumentError: The folder cannot be written.
    """
    try:
        tensorboard: Any = importlib.import_module("torch.utils.tensorboard")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "torch writes TensorBoard's files with the package tensorboard, which is not "
            "installed. Install it with: pip install 'residency[report]'",
            name="tensorboard",
        ) from error
    check_folder(folder)
    for run in runs:
        writer = tensorboard.SummaryWriter(str(folder / f"rank{run.rank}"))
        started = float(run.header.get("started_at", 0.0))
        for visit in run.visits:
            if visit.end is None:
                continue
            at = {"global_step": visit.number, "walltime": started + visit.end.seconds}
            for name in CLASSES:
                if visit.end.figures.get(name) is not None:
                    writer.add_scalar(f"{visit.phase}/{name}", visit.end.bytes_of(name), **at)
            writer.add_scalar(f"{visit.phase}/peak", visit.peak, **at)
        writer.close()


def write_trace(runs: list[RecordedRun], file: Path) -> None:
    """Writes phases as slices and classes as counters, a process for each rank.

    Raises:
        InvalidArgumentError: The file cannot be written.
    """
    events = [event for run in runs for event in _events(run)]
    write_text(file, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False))


def _events(run: RecordedRun) -> list[dict[str, object]]:
    process: dict[str, Any] = {"pid": run.rank}
    events = [{**process, "ph": "M", "name": "process_name", "args": {"name": f"rank {run.rank}"}}]
    for visit in run.visits:
        begin = visit.begin.seconds * _MICROSECONDS
        slice_ = {
            **process,
            "tid": visit.thread,
            "name": visit.phase.rpartition("/")[2],
            "ts": begin,
        }
        if visit.end is None:  # open at the end of the file
            events.append({**slice_, "ph": "B"})
            continue
        arguments = {"visit": visit.number, "peak": visit.peak, "error": visit.error}
        duration = visit.end.seconds * _MICROSECONDS - begin
        events.append({**slice_, "ph": "X", "dur": duration, "args": arguments})
    for boundary in run.boundaries():
        sizes = {name: boundary.bytes_of(name) for name in CLASSES}
        at = boundary.seconds * _MICROSECONDS
        events.append({**process, "ph": "C", "name": "device memory", "ts": at, "args": sizes})
    return events


def write_text(file: Path, text: str) -> None:
    """Writes a file, or says why it cannot be written.

    Raises:
        InvalidArgumentError: The file cannot be written.
    """
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidArgumentError(f"{str(file)!r} cannot be written: {error.strerror}.") from None


def check_folder(folder: Path) -> None:
    """Makes a folder, or says why it cannot be made.

    Raises:
        InvalidArgumentError: The folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError(
            f"{str(folder)!r} cannot be written: {error.strerror}."
        ) from None
