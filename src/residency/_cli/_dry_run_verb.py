"""``residency dry-run``: says whether a training script fits a GPU, on a machine that has none."""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from residency import _dryrun, sim
from residency._errors import InvalidArgumentError
from residency._units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from residency._dryrun import Answer, RunSettings, TriedNumber

_FOR_TEMPORARIES = " for temporaries that are not modelled"
_LEFT_BY_SEARCHES = "300MiB"  # as docs/reference/dry-run.md asks for: what is not modelled
_DESCRIPTION = """\
Will it fit, with which batch, and which changes make it fit? For an unmodified training script
that says cuda, on a machine without a GPU:

  residency dry-run --device l4 -- python train.py                   does it fit?
  residency dry-run --device l4 --largest batch -- python train.py   the largest batch that fits
  residency dry-run --device l4 --fit -- python train.py             the changes that make it fit

The script runs on a simulated GPU, for shapes only, in seconds. The answer has the peak of each
phase, who holds it, and the line that runs out of memory."""
_EPILOG = """\
status: 0 if it fits, 1 if it does not, 3 if neither was seen, as the script failed, made no step or
was interrupted, 2 if the run cannot be made. How near the figures are:
docs/reference/dry-run-figures.md"""
_ROOM = 1 << 44  # bytes of a device that holds everything
_OF_NO_CARD = "no card was named: an A100's kernels by torch's sources, and an H100's context"
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
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    _add_questions(parser.add_argument_group("what is asked"))
    device = parser.add_argument_group("the device")
    device.add_argument(
        "--device", metavar="GPU",
        help="a card by its name, such as l4 or rtx4090; one that is not known lists them all",
    )  # fmt: skip
    device.add_argument(
        "--capacity", metavar="BYTES", help="memory of any card, or in place of its own, as 24GiB"
    )
    device.add_argument(
        "--others", metavar="BYTES",
        help="memory that other programs hold, such as a display (0B; --fit and --largest then "
        "leave 300MiB, for temporaries that are not modelled)",
    )  # fmt: skip
    device.add_argument(
        "--ranks", metavar="N", type=int, default=1,
        help="run the first rank of N, each with such a device (1, or torchrun's --nproc-per-node)",
    )  # fmt: skip
    script = parser.add_argument_group("the script")
    script.add_argument(
        "--steps", metavar="N", type=int, default=2,
        help="end the training after so many optimizer steps; 0: at the script's own end (2)",
    )  # fmt: skip
    script.add_argument("--real", action="store_true", help="compute bytes, too; much slower")
    script.add_argument(
        "--random-weights", action="store_true",
        help="make pretrained models without their weights, from_pretrained by a config.json",
    )  # fmt: skip
    script.add_argument("--quiet", action="store_true", help="do not show what the script prints")
    parser.add_argument(
        "command", metavar="-- COMMAND", nargs=argparse.REMAINDER, help="as in: -- python train.py"
    )
    parser.set_defaults(run=run)


def _add_questions(asked: argparse._ArgumentGroup) -> None:
    search = asked.add_mutually_exclusive_group()
    search.add_argument(
        "--fit", action="store_true",
        help="if it does not fit, look for the cheapest settings with which it does",
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

    words = arguments.command[arguments.command[:1] == ["--"] :]
    if not words:
        raise InvalidArgumentError("there is no command; expected one after --: -- python train.py")
    settings, device = _settings(arguments)
    _check_file(arguments.html)
    # JSON alone goes to stdout, and the script's own words nowhere then.
    runner = _Runner(arguments, device)
    console = Console(stderr=arguments.json)
    if arguments.largest:
        return _largest(arguments, words, settings, runner, console)
    answer = runner.answer(words, settings)
    _dryrun.print_answer(answer, console, () if arguments.fit else _next_questions(answer))
    made = answer.as_dict()
    if arguments.fit and answer.is_too_large:
        made["fit"] = _fit(words, settings, answer, runner, console, _left(arguments))
    if arguments.json:
        print(json.dumps(made))
    if arguments.html:
        _dryrun.write_page(answer, arguments.html, words)
    return answer.verdict.status


def _left(arguments: argparse.Namespace) -> int:
    """Returns the bytes that a search leaves free, where no other programs were spoken of."""
    return parse_bytes(_LEFT_BY_SEARCHES) if arguments.others is None else 0


def _next_questions(answer: Answer) -> Iterator[str]:
    """Yields what to ask next, as a line below the verdict."""
    if answer.is_too_large:
        yield "the changes that make it fit: --fit; the largest batch that fits: --largest batch"
    elif answer.fits and answer.found["steps"]:
        yield "the largest batch that fits: --largest batch"


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
    words: Sequence[str],
    settings: RunSettings,
    answer: Answer,
    runner: _Runner,
    console: Console,
    left: int,
) -> list[dict[str, Any]]:
    """Prints what was tried to make a script fit; returns it for JSON."""
    made: list[dict[str, Any]] = []
    nearest = answer
    room = f", with {format_bytes(left)} left{_FOR_TEMPORARIES}" * bool(left)
    _say(console, f"\n[bold]changes that make it fit[/], the cheapest first{room}:")
    for tried in _dryrun.settings_that_fit(
        settings,
        answer,
        lambda changed, tries: runner.answer(words, changed, is_quiet=True, tries=tries),
        words,
        left=left,
    ):
        outcome = tried.answer
        said = _verdict(outcome) if tried.suits else _why_it_does_not_suit(outcome)
        _say(console, f"  {tried.name}: {said}")
        if outcome.fits:
            _say(console, f"    costs: {tried.cost}")
            for line in tried.lines:
                console.print(f"    {line}", highlight=False, markup=False, soft_wrap=True)
        if outcome.fits or (outcome.needed < nearest.needed and outcome.is_too_large):
            nearest = outcome
        made.append(
            {"name": tried.name, "lines": tried.lines, "cost": tried.cost, "suits": tried.suits}
            | _in_short(outcome)
        )
    if not nearest.fits:
        missing = format_bytes(max(0, left - nearest.headroom))
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
    what, left = arguments.largest, _left(arguments)
    tried = []
    for each in _dryrun.largest_that_fits(
        words,
        settings,
        what,
        lambda changed, with_it: runner.answer(changed, with_it, is_quiet=True, has_second=False),
        left=left,
    ):
        tried.append(each)
        _say(console, f"{what} {each.number}: {_verdict(each.answer)}")
    best, end = _dryrun.largest_seen(tried)
    for line in _said_of_largest(what, tried, best, end):
        _say(console, line)
    if best is not None and left:
        _say(console, f"{format_bytes(left)} of them are left{_FOR_TEMPORARIES}")
    if arguments.json:
        made = {
            "largest": None if best is None else best.number,
            "of": what,
            "ends_at": end or None,
            "tried": [
                {"number": each.number, "is_seen": each.is_seen} | _in_short(each.answer)
                for each in tried
            ],
            "answer": None if best is None else best.answer.as_dict(),
        }
        print(json.dumps(made))
    if arguments.html and best is not None:
        _dryrun.write_page(best.answer, arguments.html, words)
    if best is not None:
        return 0
    return max(each.answer.verdict.status for each in tried)


def _said_of_largest(
    what: str, tried: Sequence[TriedNumber], best: TriedNumber | None, end: int
) -> Iterator[str]:
    """Yields what came of the numbers that were tried, of which those above an end say nothing."""
    above = [each for each in tried if best is None or each.number > best.number]
    failed = [each for each in above if each.is_seen and not each.answer.is_too_large]
    failed = [each for each in failed if not each.answer.fits]
    if best is not None:
        words = "that was seen to fit" if end else "that fits"
        spare = format_bytes(best.answer.headroom)
        yield f"[bold]largest {what} {words}: {best.number}[/], {spare} to spare"
    elif any(each.answer.is_too_large for each in tried):
        yield f"[bold]no {what} fits[/]"
    else:
        yield f"[bold]no {what} was seen to fit[/]"
    if end:
        yield (
            f"the script's data end at {end}, or the number does not reach the computation: "
            "larger ones take no more, and were not seen. Give it more data, made-up ones do"
        )
    if failed:
        numbers = ", ".join(str(number) for number in sorted(each.number for each in failed))
        yield f"of {numbers} nothing is known: {_verdict(failed[-1].answer)}"


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)


def _escaped(text: object) -> str:
    from rich.markup import escape

    return escape(str(text))


def _verdict(answer: Answer) -> str:
    if answer.fits:
        return f"[green]fits[/], peak {format_bytes(answer.needed)}"
    words = answer.verdict.value
    if not answer.is_too_large:
        return f"{words}: {_escaped(answer.found['error'])}" if answer.found["error"] else words
    # Its peak is not known where it ended before, or where its free bytes lie in pieces.
    return words + f", peak {format_bytes(answer.needed)}" * (answer.headroom < 0)


def _why_it_does_not_suit(answer: Answer) -> str:
    """Returns what is said of a change with which a script ends that ends well without it."""
    error = answer.found["error"] or answer.found["caught"] or answer.verdict.value
    return f"does not suit this script: {_escaped(error)}"


def _in_short(answer: Answer) -> dict[str, Any]:
    error = None if answer.fits or answer.is_too_large else answer.found["error"]
    return {
        "verdict": answer.verdict.value,
        "fits": answer.fits,
        "needed_bytes": answer.needed,
        "error": error,
    }


class _Runner:
    """The maker of runs, as the arguments say."""

    def __init__(self, arguments: argparse.Namespace, device: tuple[str, str]) -> None:
        self._arguments = arguments
        self._device = device

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
        is_searching = bool(self._arguments.fit or self._arguments.largest)
        command = _dryrun.Command(words, settings, _SITE, quiet, sys.stderr, tries, is_searching)
        found = _dryrun.dry_run(command)
        answer: Answer = _dryrun.answer_of(found, settings, self._device)
        if answer.is_too_large and has_second:
            ample = replace(settings, capacity=_ROOM)
            roomy = _dryrun.dry_run(replace(command, settings=ample, is_quiet=True, has_room=True))
            answer = _dryrun.answer_of(found, settings, self._device, roomy)
        return answer


def _settings(arguments: argparse.Namespace) -> tuple[RunSettings, tuple[str, str]]:
    """Returns how a run is made, what the device is called, and what its figures rest on."""
    gpu_named = sim.gpu_named  # without a simulator, the error says what to install
    if arguments.device is None and arguments.capacity is None:
        raise InvalidArgumentError(
            "which device? Give --device with a card's name, such as l4, or --capacity, as 24GiB."
        )
    if arguments.steps < 0:
        raise InvalidArgumentError(f"--steps is {arguments.steps}; expected 0 or more.")
    if arguments.ranks < 1:
        raise InvalidArgumentError(f"--ranks is {arguments.ranks}; expected 1 or more.")
    name, title, capacity, rests_on = None, "a device of this size", 0, _OF_NO_CARD
    if arguments.device is not None:
        name, gpu = gpu_named(arguments.device, name="--device")
        title, capacity, rests_on = gpu.title, gpu.capacity, gpu.rests_on
    if arguments.capacity is not None:
        capacity = parse_bytes(arguments.capacity, name="--capacity")
    if capacity == 0:
        raise InvalidArgumentError("--capacity is 0; expected a device with room for something.")
    settings = _dryrun.RunSettings(
        folder="",
        capacity=capacity,
        gpu=name,
        others=parse_bytes(arguments.others or "0B", name="--others"),
        steps=arguments.steps,
        ranks=arguments.ranks,
        is_real=arguments.real,
        random_weights=arguments.random_weights,
        shows_errors=arguments.debug,
    )
    return settings, (title, rests_on)
