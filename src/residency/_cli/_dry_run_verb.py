"""``residency dry-run``: says whether a training script fits a GPU, on a machine that has none."""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from residency._errors import InvalidArgumentError
from residency._units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from residency._dryrun import Answer, RunSettings, TriedNumber

_EXIT_DOES_NOT_FIT = 1
_EXIT_INCOMPLETE = 3
_ROOM = 1 << 44  # bytes of a device that holds everything
_SITE = Path(__file__).parent / "_site"


def add_parser(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser
) -> None:
    """Adds the verb to the command line, with the options that all verbs have in common."""
    parser = verbs.add_parser(
        "dry-run",
        parents=[common],
        usage="residency dry-run --device GPU [options] -- python train.py ...",
        help="say whether a CUDA training script fits a GPU, on a machine without one",
        description=(
            "Runs an unmodified training script that says cuda on a simulated GPU, for shapes "
            "only: its peak of memory in every phase, who holds it, and where it runs out. Status: "
            "0 where it fits, 1 where it does not, 3 where the script failed for another reason, "
            "2 when the run cannot be made."
        ),
    )
    device = parser.add_argument_group("the device")
    device.add_argument(
        "--device", metavar="GPU",
        help="a card by its name, such as l4 or rtx4090; one that is not known lists them all",
    )  # fmt: skip
    device.add_argument(
        "--capacity", metavar="BYTES", help="memory of any card, or in place of its own, as 24GiB"
    )
    device.add_argument(
        "--others", metavar="BYTES", default="0B",
        help="memory that other programs hold, such as a display (0B)",
    )  # fmt: skip
    device.add_argument(
        "--ranks", metavar="N", type=int, default=1,
        help="run the first rank of N, each with such a device (1, or torchrun's --nproc-per-node)",
    )  # fmt: skip
    script = parser.add_argument_group("the script")
    script.add_argument(
        "--steps", metavar="N", type=int, default=2,
        help="end the training after so many optimizer steps; 0: where the script ends (2)",
    )  # fmt: skip
    script.add_argument("--real", action="store_true", help="compute bytes, too; much slower")
    script.add_argument(
        "--random-weights", action="store_true",
        help="make pretrained models without their weights, from_pretrained by a config.json",
    )  # fmt: skip
    script.add_argument("--quiet", action="store_true", help="do not show what the script prints")
    _add_questions(parser.add_argument_group("what is asked"))
    parser.add_argument(
        "command", metavar="-- COMMAND", nargs=argparse.REMAINDER, help="as in: -- python train.py"
    )
    parser.set_defaults(run=run)


def _add_questions(asked: argparse._ArgumentGroup) -> None:
    search = asked.add_mutually_exclusive_group()
    search.add_argument(
        "--fit", action="store_true",
        help="where it does not fit, look for the cheapest settings with which it does",
    )  # fmt: skip
    search.add_argument(
        "--largest", choices=("batch", "sequence"),
        help="look for the largest number that fits, in place of {batch} or {sequence} in the "
        "command, or of an option such as --batch-size",
    )  # fmt: skip
    asked.add_argument(
        "--json", action="store_true", help="print JSON alone, and the answer for people on stderr"
    )
    asked.add_argument("--html", metavar="FILE", type=Path, help="write a page with a timeline")


def run(arguments: argparse.Namespace) -> int:
    """Makes the run, prints the answer and returns the exit status."""
    from rich.console import Console

    from residency import _dryrun

    words = arguments.command[arguments.command[:1] == ["--"] :]
    if not words:
        raise InvalidArgumentError("there is no command; expected one after --: -- python train.py")
    settings, title = _settings(arguments)
    _check_file(arguments.html)
    # JSON alone goes to stdout, and the script's own words nowhere then.
    runner = _Runner(arguments, title, _dryrun)
    console = Console(stderr=arguments.json)
    if arguments.largest:
        return _largest(arguments, words, settings, runner, console)
    answer = runner.answer(words, settings)
    _dryrun.print_answer(answer, console)
    made = answer.as_dict()
    if arguments.fit and not answer.fits:
        made["fit"] = _fit(words, settings, answer, runner, console)
    if arguments.json:
        print(json.dumps(made))
    if arguments.html:
        _dryrun.write_page(answer, arguments.html, words)
    if answer.fits:
        return 0 if answer.is_complete else _EXIT_INCOMPLETE
    return _EXIT_DOES_NOT_FIT


def _check_file(file: Path | None) -> None:
    """Finds out that a file can be written before a run is made.

    Raises:
        InvalidArgumentError: The file cannot be written.
    """
    if file is None:
        return
    try:
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if file.exists():
            file.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=file.absolute().parent).close()
    except OSError as error:
        raise InvalidArgumentError(
            f"the page {str(file)!r} cannot be written: {error.strerror}; name another file. "
            "Nothing was run."
        ) from None


def _fit(
    words: Sequence[str], settings: RunSettings, answer: Answer, runner: _Runner, console: Console
) -> list[dict[str, Any]]:
    """Prints what was tried to make a script fit; returns it for JSON."""
    from residency import _dryrun

    made: list[dict[str, Any]] = []
    nearest = answer
    _say(console, "\n[bold]what makes it fit[/], the cheapest first:")
    for tried in _dryrun.settings_that_fit(
        settings,
        answer,
        lambda changed, tries: runner.answer(words, changed, is_quiet=True, tries=tries),
        words,
    ):
        outcome = tried.answer
        _say(console, f"  {tried.name}: {_verdict(outcome)}")
        if outcome.is_good:
            _say(console, f"    costs: {tried.cost}")
            for line in tried.lines:
                console.print(f"    {line}", highlight=False, markup=False, soft_wrap=True)
        if outcome.is_good or (outcome.needed < nearest.needed and not outcome.fits):
            nearest = outcome
        made.append(
            {"name": tried.name, "lines": tried.lines, "cost": tried.cost} | _in_short(outcome)
        )
    if not nearest.is_good:
        missing = format_bytes(max(0, -nearest.headroom))
        with_it = "nothing comes nearer" if nearest is answer else "the nearest"
        _say(console, f"  nothing that is known here; {with_it}: {missing} are missing still")
    return made


def _largest(
    arguments: argparse.Namespace,
    words: Sequence[str],
    settings: RunSettings,
    runner: _Runner,
    console: Console,
) -> int:
    from residency import _dryrun

    what = arguments.largest
    tried = []
    for each in _dryrun.largest_that_fits(
        words,
        settings,
        what,
        lambda changed, with_it: runner.answer(changed, with_it, is_quiet=True, has_second=False),
    ):
        tried.append(each)
        _say(console, f"{what} {each.number}: {_verdict(each.answer)}")
    best = max((each for each in tried if each.answer.is_good), key=_number, default=None)
    above = [each for each in tried if best is None or each.number > best.number]
    if best is None:
        _say(console, f"[bold]no {what} fits[/]")
    else:
        spare = format_bytes(best.answer.headroom)
        _say(console, f"[bold]largest {what} that fits: {best.number}[/], {spare} to spare")
    failed = sorted(each.number for each in above if each.answer.fits)
    if failed:
        numbers = ", ".join(map(str, failed))
        _say(console, f"of {numbers} nothing is known: the script ends in an error")
    if arguments.json:
        made = {
            "largest": None if best is None else best.number,
            "of": what,
            "tried": [{"number": each.number} | _in_short(each.answer) for each in tried],
            "answer": None if best is None else best.answer.as_dict(),
        }
        print(json.dumps(made))
    if arguments.html and best is not None:
        _dryrun.write_page(best.answer, arguments.html, words)
    if best is not None:
        return 0
    return _EXIT_INCOMPLETE if failed else _EXIT_DOES_NOT_FIT


def _number(tried: TriedNumber) -> int:
    return tried.number


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)


def _verdict(answer: Answer) -> str:
    from rich.markup import escape

    if answer.is_good:
        return f"[green]fits[/], peak {format_bytes(answer.needed)}"
    if answer.fits:
        return f"the script failed: {escape(str(answer.found['error']))}"
    if answer.headroom < 0:
        return f"does not fit, peak {format_bytes(answer.needed)}"
    return "does not fit"  # it ended before its peak, or its free bytes lie in pieces


def _in_short(answer: Answer) -> dict[str, Any]:
    error = answer.found["error"] if answer.fits and not answer.is_complete else None
    return {"fits": answer.is_good, "needed_bytes": answer.needed, "error": error}


class _Runner:
    """The maker of runs, as the arguments say."""

    def __init__(self, arguments: argparse.Namespace, title: str, dryrun: Any) -> None:
        self._arguments = arguments
        self._title = title
        self._dryrun = dryrun

    def answer(
        self,
        words: Sequence[str],
        settings: RunSettings,
        *,
        is_quiet: bool = False,
        has_second: bool = True,
        tries: str = "",
    ) -> Answer:
        """Makes a run; a second one, on a device that holds everything, where it does not fit."""
        quiet = is_quiet or self._arguments.quiet or self._arguments.json
        words = [settings.words.get(index, word) for index, word in enumerate(words)]
        command = self._dryrun.Command(words, settings, _SITE, quiet, sys.stderr, tries)
        found = self._dryrun.dry_run(command)
        roomy = None
        is_over = found["was_interrupted"] or found["ended"] in ("finished", "left")
        if found["out_of_memory"] and has_second and not is_over:
            ample = replace(settings, capacity=_ROOM)
            roomy = self._dryrun.dry_run(replace(command, settings=ample, is_quiet=True))
        answer: Answer = self._dryrun.answer_of(found, settings, self._title, roomy)
        return answer


def _settings(arguments: argparse.Namespace) -> tuple[RunSettings, str]:
    from residency._dryrun import RunSettings
    from residency.sim import gpu_named

    if arguments.device is None and arguments.capacity is None:
        raise InvalidArgumentError(
            "which device? Give --device with a card's name, such as l4, or --capacity, as 24GiB."
        )
    if arguments.steps < 0:
        raise InvalidArgumentError(f"--steps is {arguments.steps}; expected 0 or more.")
    if arguments.ranks < 1:
        raise InvalidArgumentError(f"--ranks is {arguments.ranks}; expected 1 or more.")
    name, title, capacity = None, "a device of this size", 0
    if arguments.device is not None:
        name, gpu = gpu_named(arguments.device, name="--device")
        title, capacity = gpu.title, gpu.capacity
    if arguments.capacity is not None:
        capacity = parse_bytes(arguments.capacity, name="--capacity")
    if capacity == 0:
        raise InvalidArgumentError("--capacity is 0; expected a device with room for something.")
    settings = RunSettings(
        folder="",
        capacity=capacity,
        gpu=name,
        others=parse_bytes(arguments.others, name="--others"),
        steps=arguments.steps,
        ranks=arguments.ranks,
        is_real=arguments.real,
        random_weights=arguments.random_weights,
        shows_errors=arguments.debug,
    )
    return settings, title
