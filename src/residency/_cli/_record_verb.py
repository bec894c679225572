"""``residency record``: runs a command with every Python process of it recorded.

The processes learn of it through the environment, by a ``sitecustomize`` that is put on their path,
so that it does not matter how they are started: ``python train.py``, ``python -m package``,
``torchrun``, or a shell script with any of them.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
import tempfile
from pathlib import Path

from residency._commands import start_command
from residency._errors import InvalidArgumentError
from residency._memory import (
    PATH_VARIABLE,
    PEAKS,
    PEAKS_VARIABLE,
    may_be_replaced,
    records_of,
)

_SITE = Path(__file__).parent / "_site"
_Identity = tuple[int, int, int]  # a file's inode, size and time of change
_SIGNALLED = 128  # what a shell adds to the number of the signal that ended a command


def add_parser(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser
) -> None:
    """Adds the verb to the command line, with the options that all verbs have in common."""
    parser = verbs.add_parser(
        "record",
        parents=[common],
        help="record the memory of an unmodified training script",
        description=(
            "Runs a command and records the device memory at its phases: those that it names with "
            "residency.phase, and known calls (forward and backward passes, optimizer steps, "
            "saves, loads, evaluation, generation). Show the record with: residency report "
            "run.jsonl. Exit status: the command's; 2 when it cannot be started."
        ),
        usage="residency record [-h] [-o FILE] [--peaks {bounds,exact}] -- COMMAND ...",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, default=Path("run.jsonl"),
        help="the record (default: run.jsonl); an earlier record there is replaced",
    )  # fmt: skip
    parser.add_argument(
        "--peaks",
        choices=PEAKS,
        default=PEAKS[0],
        help="exact: reset torch's peak register at every phase; bounds: leave it alone, so that a "
        "peak may be an upper bound (default)",
    )
    parser.add_argument(
        "command",
        metavar="-- COMMAND",
        nargs=argparse.REMAINDER,
        help="a command that starts Python, as in: -- python train.py --lr 1e-4",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns its exit status."""
    command = arguments.command[arguments.command[:1] == ["--"] :]
    if not command:
        raise InvalidArgumentError("there is no command; expected one after --: -- python train.py")
    output = arguments.output.absolute()
    earlier = _earlier_records(output)
    status = _run(command, output, arguments.peaks, earlier)
    files = records_of(output)
    for file in files:
        print(f"residency: recorded {file}", file=sys.stderr)
    _say_where_nothing_was(files)
    if not files:
        print(
            f"residency: {output} was not written: no Python process of the command has used torch "
            "and come to a phase (python -E, -I and -S ignore the recording's variables)",
            file=sys.stderr,
        )
    return status if status >= 0 else _SIGNALLED - status


def _say_where_nothing_was(files: list[Path]) -> None:
    """Says so where no process of the command had an accelerator."""
    from residency import _report

    runs = [_report.read_run(file) for file in files]
    if any(run.visits for run in runs) and not _report.has_device(runs):
        print(f"residency: {_report.NO_DEVICE}", file=sys.stderr)


def _run(command: list[str], output: Path, peaks: str, earlier: dict[Path, _Identity]) -> int:
    """Runs the command; once it is known to run, what an earlier run recorded is removed.

    Raises:
        InvalidArgumentError: It cannot be started; every file is as it was.
    """
    variables = {PATH_VARIABLE: str(output), PEAKS_VARIABLE: peaks}
    process = start_command(command, site=_SITE, variables=variables)
    with process:
        try:
            _remove(earlier)
            return process.wait()
        except BaseException:  # as subprocess.call does
            process.kill()
            raise


def _identity(file: Path) -> _Identity:
    found = file.lstat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _earlier_records(output: Path) -> dict[Path, _Identity]:
    """Returns what an earlier run recorded there; finds out that the new record can be written.

    Raises:
        InvalidArgumentError: It cannot, or would take the place of what is no record.
    """
    try:
        if output.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not may_be_replaced(output):
            raise InvalidArgumentError(
                f"{str(output)!r} is there and is no record; name another file, or remove it. "
                "Nothing was changed."
            )
        with tempfile.TemporaryFile(dir=output.parent):
            pass
        return {file: _identity(file) for file in records_of(output)}
    except OSError as error:
        raise InvalidArgumentError(
            f"the record {str(output)!r} cannot be written: {error.strerror}."
        ) from None


def _remove(earlier: dict[Path, _Identity]) -> None:
    """Removes earlier records that the command has not written anew since."""
    for file, identity in earlier.items():
        try:
            if _identity(file) == identity:
                file.unlink()
        except FileNotFoundError:
            pass
        except OSError as error:
            print(
                f"residency: the earlier record {file} is still there: {error.strerror}",
                file=sys.stderr,
            )
