"""``residency dry-run``: says whether a training script fits a GPU, on a machine that has none."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from residency._errors import InvalidArgumentError
from residency._units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from residency._dryrun import Answer, RunSettings

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
        help="say whether a CUDA training script fits a GPU, on a machine without one",
        description=(
            "Runs an unmodified training script that says cuda on a simulated GPU, for shapes "
            "only: its peak of memory in every phase, who holds it, and where it runs out. Status: "
            "0 where it fits, 1 where it does not, 3 where the script failed for another reason, "
            "2 when the run cannot be made."
        ),
    )
    device = parser.add_argument_group("the device")
    device.add_argument("--device", metavar="GPU", help="a card by its name, such as l4 or rtx4090")
    device.add_argument("--capacity", metavar="BYTES", help="its memory, such as 24GiB")
    device.add_argument(
        "--others", metavar="BYTES", default="0B",
        help="memory that other programs hold, such as a display (0B)",
    )  # fmt: skip
    device.add_argument(
        "--ranks", metavar="N", type=int, default=1,
        help="run the first rank of N, each with such a device (1, or what torchrun is told)",
    )  # fmt: skip
    script = parser.add_argument_group("the script")
    script.add_argument(
        "--steps", metavar="N", type=int, default=2,
        help="end the training after so many optimizer steps; 0: where the script ends (2)",
    )  # fmt: skip
    script.add_argument("--real", action="store_true", help="compute bytes, too; much slower")
    script.add_argument(
        "--random-weights", action="store_true",
        help="let from_pretrained make models from a folder's config.json alone",
    )  # fmt: skip
    script.add_argument("--quiet", action="store_true", help="do not show what the script prints")
    asked = parser.add_argument_group("what is asked")
    asked.add_argument("--fit", action="store_true", help="look for settings with which it fits")
    asked.add_argument(
        "--largest", choices=("batch", "sequence"),
        help="look for the largest number that fits, in place of {batch} or {sequence}, or of a "
        "flag such as --batch-size",
    )  # fmt: skip
    asked.add_argument("--json", action="store_true", help="print the answer as JSON on stdout")
    asked.add_argument("--html", metavar="FILE", type=Path, help="write a page with a timeline")
    parser.add_argument(
        "command", metavar="-- COMMAND", nargs=argparse.REMAINDER, help="as in: -- python train.py"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Makes the run, prints the answer and returns the exit status."""
    from rich.console import Console

    from residency import _dryrun

    words = arguments.command[arguments.command[:1] == ["--"] :]
    if not words:
        raise InvalidArgumentError("there is no command; expected one after --: -- python train.py")
    settings, title = _settings(arguments)
    # JSON alone goes to stdout, and the script's own words nowhere then.
    runner = _Runner(arguments, title, _dryrun)
    console = Console(stderr=arguments.json)
    if arguments.largest:
        return _largest(arguments, words, settings, runner, console)
    answer = runner.answer(words, settings)
    fitting = list(_fitting(arguments, words, settings, answer, runner, console))
    if arguments.json:
        print(json.dumps(answer.as_dict() | {"fit": [_as_dict(each) for each in fitting]}))
    if arguments.html:
        _dryrun.write_page(answer, arguments.html)
    if not answer.is_complete and answer.fits:
        return _EXIT_INCOMPLETE
    return 0 if answer.fits else _EXIT_DOES_NOT_FIT


def _fitting(
    arguments: argparse.Namespace,
    words: Sequence[str],
    settings: RunSettings,
    answer: Answer,
    runner: _Runner,
    console: Any,
) -> list[Any]:
    """Prints the answer, and what was tried to make it fit."""
    from residency import _dryrun

    _dryrun.print_answer(answer, console)
    if not arguments.fit or answer.fits:
        return []
    tried = []
    console.print("\n[bold]what makes it fit[/], the cheapest first:", highlight=False)
    for change in _dryrun.settings_that_fit(
        settings, answer.found, lambda changed: runner.answer(words, changed, is_quiet=True)
    ):
        tried.append(change)
        outcome = change.answer
        if outcome is None:
            continue
        verdict = "[green]fits[/]" if outcome.fits else "does not fit"
        console.print(
            f"  {change.name}: {verdict}, peak {format_bytes(outcome.needed)}",
            highlight=False,
            soft_wrap=True,
        )
        if outcome.fits:
            console.print(f"    costs: {change.cost}", highlight=False, soft_wrap=True)
            for line in change.lines:
                console.print(f"    {line}", highlight=False, markup=False, soft_wrap=True)
    if not tried or tried[-1].answer is None or not tried[-1].answer.fits:
        console.print("  nothing that is known here", highlight=False)
    return tried


def _as_dict(change: Any) -> dict[str, Any]:
    outcome = change.answer
    return {
        "name": change.name,
        "lines": change.lines,
        "cost": change.cost,
        "fits": outcome is not None and outcome.fits,
        "needed": None if outcome is None else outcome.needed,
    }


def _largest(
    arguments: argparse.Namespace,
    words: Sequence[str],
    settings: RunSettings,
    runner: _Runner,
    console: Any,
) -> int:
    from residency import _dryrun

    best: tuple[int, Answer] | None = None
    for number, answer in _dryrun.largest_that_fits(
        words,
        arguments.largest,
        lambda changed: runner.answer(changed, settings, is_quiet=True, has_second=False),
    ):
        good = answer.fits and answer.is_complete
        if good:
            best = (number, answer)
        verdict = "fits" if answer.fits else "does not fit"
        if answer.fits and not good:
            verdict = f"the script failed: {answer.found['error']}"
        size = format_bytes(answer.needed)
        console.print(f"{arguments.largest} {number}: {verdict}, peak {size}", highlight=False)
    if best is None:
        console.print(f"no {arguments.largest} fits", highlight=False)
    else:
        console.print(
            f"[bold]largest {arguments.largest} that fits: {best[0]}[/], "
            f"{format_bytes(best[1].capacity - best[1].needed)} to spare",
            highlight=False,
        )
    if arguments.json:
        largest = None if best is None else best[0]
        print(json.dumps({"largest": largest, "of": arguments.largest}))
    if arguments.html and best is not None:
        _dryrun.write_page(best[1], arguments.html)
    return 0 if best is not None else _EXIT_DOES_NOT_FIT


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
    ) -> Answer:
        """Makes a run; a second one, on a device that holds everything, where it does not fit."""
        quiet = is_quiet or self._arguments.quiet or self._arguments.json
        command = self._dryrun.Command(words, settings, _SITE, quiet, sys.stderr)
        found = self._dryrun.dry_run(command)
        roomy = None
        is_over = found["was_interrupted"] or found["ended"] in ("finished", "left")
        if found["out_of_memory"] and has_second and not is_over:
            ample = replace(settings, capacity=_ROOM)
            roomy = self._dryrun.dry_run(
                self._dryrun.Command(words, ample, _SITE, True, sys.stderr)
            )
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
        name, gpu = gpu_named(arguments.device)
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
