"""``residency record``: runs a command with every Python process of it recorded.

The processes are told through the environment, by a ``sitecustomize`` that is put on their path, so
that it does not matter how they are started: ``python train.py``, ``python -m package``,
``torchrun``, or a shell script with any of them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import residency
from residency._errors import InvalidArgumentError
from residency._memory._format import PATH_VARIABLE, PEAKS, PEAKS_VARIABLE

_SITE = Path(residency.__file__).parent / "_memory" / "_site"
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
            "residency.phase, and known calls (optimizer steps, saves, loads, evaluation, "
            "generation). Exit status: the command's; 2 when it cannot be started."
        ),
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, default=Path("run.jsonl"),
        help="the record (run.jsonl); one that is there is replaced",
    )  # fmt: skip
    parser.add_argument(
        "--peaks",
        choices=PEAKS,
        default=PEAKS[0],
        help="exact: reset torch's peak register at every phase (default: leave it alone)",
    )
    parser.add_argument(
        "command", metavar="-- COMMAND", nargs=argparse.REMAINDER, help="as in: -- python train.py"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns its exit status."""
    command = arguments.command[arguments.command[:1] == ["--"] :]
    if not command:
        raise InvalidArgumentError("there is no command; expected one after --: -- python train.py")
    if shutil.which(command[0]) is None:
        raise InvalidArgumentError(
            f"{command[0]!r} is no program that can be run; "
            "expected a command such as: -- python train.py"
        )
    output = arguments.output.absolute()
    _clear(output)
    try:
        status = subprocess.run(command, env=_environment(output, arguments.peaks)).returncode
    finally:
        files = _files(output)
    for file in files:
        print(f"residency: recorded {file}", file=sys.stderr)
    if not files:
        print(
            f"residency: {output} was not written: no Python process of the command has used torch "
            "(python -E, -I and -S ignore what the recording needs)",
            file=sys.stderr,
        )
    return status if status >= 0 else _SIGNALLED - status


def _environment(output: Path, peaks: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(_SITE), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, PATH_VARIABLE: str(output), PEAKS_VARIABLE: peaks}


def _files(output: Path) -> list[Path]:
    """Returns the records of all processes: of each rank, and of helpers by their ids."""
    prefixes = tuple(f"{output.stem}.{kind}" for kind in ("rank", "pid"))
    beside = output.parent.glob(f"*{output.suffix}") if output.parent.is_dir() else iter(())
    return sorted(file for file in beside if file == output or file.name.startswith(prefixes))


def _clear(output: Path) -> None:
    """Removes what an earlier run recorded there, and finds out that the folder can be written.

    Raises:
        InvalidArgumentError: It cannot.
    """
    try:
        for file in _files(output):
            file.unlink()
        output.touch()
        output.unlink()
    except OSError as error:
        raise InvalidArgumentError(
            f"the record {str(output)!r} cannot be written: {error.strerror}."
        ) from None
