"""``residency checkpoint``: lists, verifies and thins out the saves of a directory. It imports no
torch, so that it answers at once.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from residency._checkpoint import progress_bar
from residency._checkpoint._disk import (
    ADVICE,
    CheckpointDirectory,
    Manifest,
    Retention,
    Verification,
    steps_above,
    verify_save,
)
from residency._errors import CheckpointError, InvalidArgumentError
from residency._units import format_bytes

_EXIT_DAMAGED = 1
_NOTHING = "-"
_WIDTH = 100


def add_parser(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser
) -> None:
    """Adds the verb to the command line, with the options that all verbs have in common."""
    parser = verbs.add_parser(
        "checkpoint",
        help="list, verify or prune the saves of a checkpoint directory",
        description="Lists, verifies or prunes the saves that a residency.Checkpointer wrote.",
    )
    tasks = parser.add_subparsers(title="tasks", metavar="TASK", required=True)

    def add_task(name: str, run: Callable[[argparse.Namespace], int], text: str) -> Any:
        task = tasks.add_parser(name, parents=[common], help=text, description=text)
        task.add_argument(
            "directory", metavar="DIR", type=Path, help="the checkpointer's directory"
        )
        task.add_argument("--json", action="store_true", help="print the data as JSON on stdout")
        task.set_defaults(run=run)
        return task

    add_task("list", _list, "List the published saves.")
    verify = add_task(
        "verify",
        _verify,
        "Read every byte and compare its checksum. Exit status 0 when all is as it was written, "
        "1 when something is damaged, 2 on an error.",
    )
    verify.add_argument("--step", type=int, metavar="N", help="verify this save only")
    prune = add_task(
        "prune", _prune, "Remove saves; the newest one always stays, but with --above."
    )
    prune.add_argument(
        "--above", type=int, metavar="STEP", help="remove saves above STEP, to go on from there"
    )
    prune.add_argument("--keep", type=int, metavar="N", help="keep the newest N")
    prune.add_argument("--best", type=int, default=0, metavar="K", help="keep the K best, too")
    prune.add_argument(
        "--metric", metavar="NAME", help="metric to rank saves by: the lowest is the best"
    )
    prune.add_argument("--greatest", action="store_true", help="the highest is the best")
    prune.add_argument("--dry-run", action="store_true", help="remove nothing, say what would be")


@dataclass(frozen=True, slots=True)
class _SaveRow:
    """The facts of one save that are there without reading its tensors."""

    step: int
    num_bytes: int | None
    num_files: int | None
    world_size: int | None
    metrics: dict[str, float | str]
    saved_at: str | None
    damage: str | None


def _list(arguments: argparse.Namespace) -> int:
    directory = _open_directory(arguments.directory)
    rows = [_row(directory, step) for step in directory.steps()]
    if arguments.json:
        _print_json({"directory": str(directory.path), "saves": [asdict(row) for row in rows]})
        return 0
    _print_table(
        f"{len(rows)} saves in {directory.path}",
        ("step", "size", "files", "ranks", "metrics", "saved at", "damage"),
        [
            (
                str(row.step),
                _NOTHING if row.num_bytes is None else format_bytes(row.num_bytes),
                _or_nothing(row.num_files),
                _or_nothing(row.world_size),
                "  ".join(f"{k}={_figure(v)}" for k, v in row.metrics.items()) or _NOTHING,
                row.saved_at or _NOTHING,
                row.damage or _NOTHING,
            )
            for row in rows
        ],
    )
    return 0


def _row(directory: CheckpointDirectory, step: int) -> _SaveRow:
    damage = None
    try:
        directory.open(step)
    except CheckpointError as error:
        damage = str(error)
    try:
        manifest = directory.manifest(step)
    except CheckpointError:  # then it is what the damage is
        return _SaveRow(step, None, None, None, {}, _saved_at(directory, step), damage)
    return _SaveRow(
        step,
        _size_of(manifest),
        sum(len(rank.files) for rank in manifest.ranks),
        len(manifest.ranks),
        # JSON has no word for what is not finite.
        {k: v if math.isfinite(v) else str(v) for k, v in manifest.metrics.items()},
        _saved_at(directory, step),
        damage,
    )


def _size_of(manifest: Manifest) -> int:
    return sum(file.num_bytes for rank in manifest.ranks for file in rank.files.values())


def _saved_at(directory: CheckpointDirectory, step: int) -> str:
    seconds = directory.folder(step).stat().st_mtime
    return datetime.fromtimestamp(seconds, tz=UTC).isoformat(" ", "seconds")


def _verify(arguments: argparse.Namespace) -> int:
    directory = _open_directory(arguments.directory)
    steps = directory.steps() if arguments.step is None else [arguments.step]
    if not steps:
        raise InvalidArgumentError(
            f"{directory.path} holds no save to verify; give the directory of a Checkpointer, or "
            "one save in it."
        )
    for step in steps:
        directory.folder(step)  # a step that is not there is an error before anything is read
    total = _bytes_to_verify(directory, steps)
    with progress_bar("verifying", total, is_shown=True) as advance:
        results = [verify_save(directory, step, on_bytes=advance) for step in steps]
    damaged = [result for result in results if result.damages]
    if arguments.json:
        _print_json(
            {
                "directory": str(directory.path),
                "whole": not damaged,
                "saves": [asdict(result) for result in results],
            }
        )
    else:
        _print_table(
            f"{len(damaged)} of {len(results)} saves in {directory.path} are damaged",
            ("step", "read", "result"),
            [line for result in results for line in _lines(result)],
        )
        if damaged:
            print(ADVICE)
    return _EXIT_DAMAGED if damaged else 0


def _lines(result: Verification) -> list[tuple[str, str, str]]:
    texts = [damage.reason for damage in result.damages] or ["whole"]
    firsts = [(str(result.step), format_bytes(result.num_bytes)), *[("", "")] * (len(texts) - 1)]
    return [(*first, text) for first, text in zip(firsts, texts, strict=True)]


def _prune(arguments: argparse.Namespace) -> int:
    is_thinned = arguments.keep is not None or bool(arguments.best)
    if is_thinned == (arguments.above is not None):
        raise InvalidArgumentError(
            "give prune --keep N, or --best K with --metric NAME; or --above STEP alone."
        )
    retention = Retention(arguments.keep, arguments.best, arguments.metric, arguments.greatest)
    directory = _open_directory(arguments.directory)
    if arguments.dry_run:
        leftovers = []
        if arguments.above is not None:
            steps = steps_above(directory.steps(), arguments.above)
        else:
            steps = directory.beyond(retention)
    else:
        directory.lock()
        try:
            leftovers = directory.clean_up()
            if arguments.above is not None:
                steps = directory.remove_above(arguments.above)
            else:
                steps = directory.apply(retention)
        finally:
            directory.unlock()
    kept = [step for step in directory.steps() if step not in steps]
    if arguments.json:
        _print_json(
            {
                "directory": str(directory.path),
                "dry_run": arguments.dry_run,
                "removed": steps,
                "kept": kept,
                "leftovers": [folder.name for folder in leftovers],
            }
        )
        return 0
    word = "would be removed" if arguments.dry_run else "removed"
    rows = [(str(step), word if step in steps else "kept") for step in sorted([*steps, *kept])]
    rows += [(folder.name, "removed: a dead writer's") for folder in leftovers]
    _print_table(f"{directory.path}: {len(steps)} {word}", ("step", "result"), rows)
    return 0


def _open_directory(path: Path) -> CheckpointDirectory:
    """Returns the directory, or raises InvalidArgumentError where no checkpointer writes."""
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise InvalidArgumentError(f"{path} {what}; expected a checkpointer's directory.")
    directory = CheckpointDirectory(path)
    if directory.steps() or (path / ".lock").exists():
        return directory
    if (path / "manifest.json").exists():
        raise InvalidArgumentError(
            f"{path} is one save; give the directory that holds it: {path.absolute().parent}"
        )
    raise InvalidArgumentError(
        f"{path} holds no saves; expected directories such as step-00000010 in it."
    )


def _bytes_to_verify(directory: CheckpointDirectory, steps: list[int]) -> int:
    total = 0
    for step in steps:
        try:
            total += _size_of(directory.manifest(step))
        except CheckpointError:
            continue  # of one without a manifest nothing else is read
    return total


def _print_table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    from rich import box, console, markup, table

    drawn = table.Table(*columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in rows:
        drawn.add_row(*map(markup.escape, row))
    terminal = console.Console()
    if not terminal.is_terminal:
        terminal.width = _WIDTH
    terminal.print(markup.escape(title), highlight=False)
    terminal.print(drawn)


def _print_json(document: dict[str, Any]) -> None:
    print(json.dumps(document, indent=2))


def _or_nothing(count: int | None) -> str:
    return _NOTHING if count is None else str(count)


def _figure(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"
