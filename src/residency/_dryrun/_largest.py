"""Looks for the largest batch, or the longest sequence, with which a script fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from residency._dryrun._answer import Answer
from residency._dryrun._numbers import BATCH, SEQUENCE, number_in_command, number_in_script
from residency._dryrun._settings import RunSettings
from residency._dryrun._verdict import Verdict
from residency._errors import InvalidArgumentError

_NAMES = {"batch": BATCH, "sequence": SEQUENCE}
_LARGEST = 1 << 24
_LONG = 64  # a sequence from here on is looked for in multiples of it
_STRIDE = 16  # how many times the largest one so far may be tried next
_FLAT = 3  # numbers in a row whose peaks are those of a smaller one, until they are the same
Run = Callable[[Sequence[str], RunSettings], Answer]


@dataclass(frozen=True, slots=True)
class TriedNumber:
    """A number that a run was made with.

    Attributes:
        number: The number.
        answer: The run's answer.
        seen: The number up to which the run says something: a smaller one where the data end
            before, or where no phase's peak has grown since that one.
    """

    number: int
    answer: Answer
    seen: int

    @property
    def is_seen(self) -> bool:
        """Whether the run is one of the number."""
        return self.seen == self.number


def largest_that_fits(
    words: Sequence[str], settings: RunSettings, what: str, run: Run, *, left: int = 0
) -> Iterator[TriedNumber]:
    """Tries numbers until the largest one that fits is known.

    What fits with a number is taken to fit with each smaller one. A number with which the script
    fails, as it must divide another, says nothing of memory: from then on rounder ones are tried.
    A number that the script's data do not fill says nothing either; neither do numbers with which
    no phase takes more than with smaller ones.

    Args:
        words: The command, with ``{batch}`` or ``{sequence}``, or with a flag that scripts commonly
            have for it, or of a script with such an option.
        settings: Those of the runs.
        what: ``"batch"`` or ``"sequence"``.
        run: Makes a run of a command.
        left: Bytes of the device that are to be left free; no peak of an answer counts them.

    Yields:
        Each number with its answer. The largest of those that fit and were seen is the result;
        above it lies one that does not fit, or of which nothing is known.

    Raises:
        InvalidArgumentError: There is no such number, or the script fails before it is changed.
    """
    settings = replace(settings, others=settings.others + left)
    number, run_with = _place(words, settings, what, run)
    search = _NumberSearch(number, is_long=what == "sequence")
    while number := search.next():
        answer = run_with(number)
        seen = search.note(number, answer)
        yield TriedNumber(number, replace(answer, context=answer.context - left), seen)


def largest_seen(tried: Sequence[TriedNumber]) -> tuple[TriedNumber | None, int]:
    """Returns the largest number that was seen to fit, and the one up to which larger ones say
    something; 0 where that is none of them.
    """
    end = min((each.seen for each in tried if not each.is_seen), default=0)
    good = [each for each in tried if each.answer.fits and each.is_seen]
    within = [each for each in good if not end or each.number <= end]
    return max(within, key=lambda each: each.number, default=None), end


class _NumberSearch:
    """The numbers that are known to fit, the smallest one that is not, and what to try between.

    The need of a script is nearly a straight line over a number, or steeper: where two numbers fit,
    the line through them says which one to try, and the middle is tried where it has failed.
    """

    def __init__(self, number: int, *, is_long: bool) -> None:
        """Begins with a number.

        Args:
            number: To try first.
            is_long: Whether large ones are multiples of 64.
        """
        self._next = number
        self._is_long = is_long
        self._fitting: list[tuple[int, int]] = []  # numbers and needs, the last one largest
        self._failing = 0
        self._step = 1
        self._has_overshot = False
        self._flat: list[int] = []  # the numbers of one height so far
        self._peaks: list[int] = []
        self._room = 0

    def next(self) -> int:
        """Returns the number to try next; 0 when the answer is known."""
        return self._next

    def note(self, number: int, answer: Answer) -> int:
        """Notes what a run has shown; returns the number up to which it says something."""
        is_first = not self._fitting and not self._failing
        self._room = answer.capacity
        end = _end_of_data(answer, number)
        if end:
            self._failing = end + 1
            largest = self._largest
            self._next = end if end > largest else 0
            return end
        if answer.fits:
            return self._note_fitting(number, answer)
        is_over = answer.verdict is Verdict.INTERRUPTED or (is_first and not answer.is_too_large)
        self._failing = number
        self._has_overshot = True
        self._step *= 1 if answer.is_too_large else 2
        self._next = 0 if is_over else self._choose()
        return number

    @property
    def _largest(self) -> int:
        return self._fitting[-1][0] if self._fitting else 0

    def _note_fitting(self, number: int, answer: Answer) -> int:
        peaks = [each["peak_allocated"] for each in answer.found["phases"]]
        if peaks != self._peaks:
            self._peaks, self._flat = peaks, []
        self._flat.append(number)
        self._fitting.append((number, answer.needed))
        self._has_overshot = False
        is_flat = len(self._flat) > _FLAT and not self._failing
        self._next = 0 if is_flat else self._choose()
        # The data end between the first of one height and the number before it.
        before = [each for each, _ in self._fitting if each < self._flat[0]]
        return max(before, default=self._flat[0]) if is_flat else number

    def _choose(self) -> int:
        largest, failing = self._largest, self._failing
        if not largest:
            return failing // 2
        step = max(self._step, _LONG) if self._is_long and largest >= _LONG else self._step
        most = (failing - 1 if failing else _STRIDE * largest) // step * step
        if not failing and largest >= _LARGEST:
            return 0
        if most <= largest:
            return 0
        on_line = self._on_line(step)
        if on_line and not self._has_overshot:
            return min(max(on_line, (largest // step + 1) * step), most)
        if not failing:
            return 2 * largest
        middle = (largest + failing) // 2 // step * step
        return middle if middle > largest else 0

    def _on_line(self, step: int) -> int:
        """Returns the largest number with room for what the line through two others says; 0 where
        there is none. It is round, as scripts want their numbers: to a quarter of the way.
        """
        largest, more = self._fitting[-1]
        # Not of two that are close: a need grows in steps, as of the allocator's segments.
        apart = [each for each in self._fitting if each[0] <= largest * 15 // 16]
        lower, less = apart[-1] if apart else (0, more)
        if more <= less:
            return 0
        way = max(0, (self._room - more) * (largest - lower) // (more - less))
        granule = max(step, 1 << max(0, (way // 4).bit_length() - 1))
        return (largest + way) // granule * granule


def _end_of_data(answer: Answer, number: int) -> int:
    """Returns how many samples the script's data have, where they do not fill a batch; else 0."""
    data = answer.found["left_out"]["data"]
    is_known = data and not answer.is_too_large and data["samples"] < min(number, data["batch"])
    return data["samples"] if is_known else 0


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
            f"that is known here; write {place} in its place, as in: -- python train.py "
            f"--my-flag {place}. Numbers in configuration files cannot be changed."
        )
    change = number.change
    return number.value, lambda other: run(words, change(settings, other))
