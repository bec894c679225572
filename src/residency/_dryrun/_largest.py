"""Looks for the largest batch, or the longest sequence, with which a script fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from residency._dryrun._answer import Answer
from residency._dryrun._numbers import BATCH, SEQUENCE, number_in_command, number_in_script
from residency._dryrun._settings import RunSettings
from residency._errors import InvalidArgumentError

_NAMES = {"batch": BATCH, "sequence": SEQUENCE}
_LARGEST = 1 << 24
_LONG = 64  # a sequence from here on is looked for in multiples of it
Run = Callable[[Sequence[str], RunSettings], Answer]


@dataclass(frozen=True, slots=True)
class TriedNumber:
    """A number that a run was made with.

    Attributes:
        number: The number.
        answer: The run's answer.
    """

    number: int
    answer: Answer


def largest_that_fits(
    words: Sequence[str], settings: RunSettings, what: str, run: Run
) -> Iterator[TriedNumber]:
    """Tries numbers until the largest one that fits is known.

    What fits with a number is taken to fit with each smaller one. A number with which the script
    ends in an error, as it must divide another, says nothing of memory: from then on
    rounder ones are tried.

    Args:
        words: The command, with ``{batch}`` or ``{sequence}``, or with a flag that scripts commonly
            have for it, or of a script with such an option.
        settings: Those of the runs.
        what: ``"batch"`` or ``"sequence"``.
        run: Makes a run of a command.

    Yields:
        Each number with its answer. The largest of those that fit is the result; above it lies
        one that does not fit, or with which the script fails.

    Raises:
        InvalidArgumentError: There is no such number, or the script fails before it is changed.
    """
    number, run_with = _place(words, settings, what, run)
    first = number
    fitting, failing = 0, 0
    step = 1
    while number:
        answer = run_with(number)
        yield TriedNumber(number, answer)
        if answer.is_good:
            fitting = number
        else:
            failing = number
            step *= 2 if answer.fits else 1
        if number == first and answer.fits and not answer.is_good:
            return  # the script fails as it stands
        if answer.found.get("was_interrupted"):
            return
        is_long = what == "sequence" and fitting >= _LONG
        number = _next(fitting, failing, max(step, _LONG) if is_long else step)


def _next(fitting: int, failing: int, step: int) -> int:
    """Returns the next number to try; 0 when the answer is known."""
    if not failing:
        return 2 * fitting if fitting < _LARGEST else 0
    if not fitting:
        return failing // 2
    middle = (fitting + failing) // 2 // step * step
    return middle if fitting < middle < failing else 0


def _place(
    words: Sequence[str], settings: RunSettings, what: str, run: Run
) -> tuple[int, Callable[[int], Answer]]:
    """Returns the number of now, and what makes a run with another one."""
    place = "{" + what + "}"

    def with_words(before: Sequence[str]) -> Callable[[int], Answer]:
        return lambda number: run([each.replace(place, str(number)) for each in before], settings)

    if any(place in word for word in words):
        return (1 if what == "batch" else _LONG), with_words(words)
    number = number_in_command(words, _NAMES[what])
    if number is None:  # the script's parser, or its Trainer, may have it all the same
        number = number_in_script(run(words, settings).found, _NAMES[what])
    if number is None:
        raise InvalidArgumentError(
            f"neither the command nor the script's argparse options have a number for a {what} "
            f"that is known here; write {place} where it stands, as in: -- python train.py "
            f"--my-flag {place}. Numbers in configuration files cannot be changed."
        )
    change = number.change
    return number.value, lambda other: run(words, change(settings, other))
