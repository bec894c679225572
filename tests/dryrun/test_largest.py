"""How the largest number is looked for, with a script that is arithmetic and takes no time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.dryrun.facts import NOTHING, answered, phase

from residency._dryrun import RunSettings, largest_seen, largest_that_fits
from residency._dryrun._answer import Answer
from residency._errors import InvalidArgumentError
from residency._units import MIB


class Sizes:
    """A script that takes a batch: its need grows with it, and it may refuse some."""

    def __init__(
        self,
        most: int,
        refuses: Callable[[int], bool] = lambda number: False,
        need: Callable[[int], int] = lambda number: number,
        samples: int = 1 << 30,
    ) -> None:
        self.most, self.refuses, self.need, self.samples = most, refuses, need, samples
        self.arguments: dict[str, Any] = {}
        self.is_of_loader = True
        self.set_up = 0
        self.seen: list[int] = []

    def run(self, words: Sequence[str], settings: RunSettings) -> Answer:
        words = [settings.words.get(index, word) for index, word in enumerate(words)]
        numbers = [int(word.partition("=")[2] or word) for word in words if word[-1].isdigit()]
        number = settings.arguments.get("batch_size") or (numbers[0] if numbers else 8)
        self.seen.append(number)
        refused = self.refuses(number)
        size = self.need(min(number, self.samples))
        need = [phase("set up", self.set_up, 0, 0, 0, 0)]
        need.append(phase("forward", 0, 0, 0, 1 if refused else size, 0))
        error = "ValueError: must divide" if refused else None
        found: dict[str, Any] = {"arguments": self.arguments}
        if self.is_of_loader and number > self.samples:
            found["left_out"] = {"data": {"samples": self.samples, "batch": number}}
        return answered(need, self.most, error=error, context=settings.others, **found)

    def largest(
        self, *words: str, what: str = "batch", left: int = 0
    ) -> tuple[int | None, list[Any]]:
        tried = list(largest_that_fits(words, NOTHING, what, self.run, left=left))
        best, _ = largest_seen(tried)
        return None if best is None else best.number, tried


@pytest.mark.parametrize(
    "words",
    [
        ("train.py", "--batch-size", "8"),
        ("train.py", "--batch_size=8"),
        ("train.py", "--per-device-train-batch-size", "8", "--lr", "3"),
        ("train.py", "--train.micro_batch_size=8"),
        ("train.py", "batch_size=8"),
        ("train.py", "-bs", "8"),
        ("train.py", "--mine={batch}"),
        ("train.py", "{batch}"),
    ],
)
@pytest.mark.parametrize("most", [1, 7, 8, 37, 1000])
def test_the_largest_batch_is_found_by_the_usual_forms_of_a_flag(words, most) -> None:
    assert Sizes(most).largest(*words)[0] == most


@pytest.mark.parametrize("form", ["--seq-len", "--block_size", "--max-length"])
def test_a_long_sequence_is_looked_for_in_multiples_of_64(form: str) -> None:
    assert Sizes(1000).largest("train.py", form, "256", what="sequence")[0] == 960


def test_a_number_that_only_the_scripts_parser_has_is_found_there() -> None:
    sizes = Sizes(37)
    sizes.arguments = {"batch_size": {"flag": "--batch-size", "value": 8}}
    assert sizes.largest("train.py")[0] == 37


def test_a_number_in_a_configuration_file_is_refused_with_what_to_write() -> None:
    with pytest.raises(InvalidArgumentError, match=r"write \{batch\}.*configuration files"):
        Sizes(8).largest("train.py", "config.yaml")


def test_numbers_that_the_script_refuses_are_not_taken_for_too_large() -> None:
    sizes = Sizes(100, refuses=lambda number: number % 16 != 0)
    largest, tried = sizes.largest("train.py", "--batch-size", "16")
    assert largest == 96
    failed = [each for each in tried if not each.answer.fits and not each.answer.is_too_large]
    assert 0 < len(failed) <= 2  # each time the numbers get rounder
    assert all(each.number > 96 for each in failed)


@pytest.mark.parametrize("samples", [3, 8, 50, 64])
@pytest.mark.parametrize("first", [8, 100])
def test_no_batch_is_said_to_fit_that_the_data_do_not_fill(samples: int, first: int) -> None:
    sizes = Sizes(380, samples=samples)
    largest, tried = sizes.largest("train.py", "--batch-size", str(first))
    assert largest == samples
    assert largest_seen(tried)[1] == samples
    assert len(sizes.seen) <= 4
    assert Sizes(samples - 1, samples=samples).largest("train.py", "{batch}")[0] == samples - 1


def test_numbers_that_take_no_more_than_smaller_ones_are_not_said_to_fit() -> None:
    sizes = Sizes(380, samples=50)
    sizes.is_of_loader = False  # which would say how many there are
    largest, tried = sizes.largest("train.py", "--batch-size", "8")
    assert largest == largest_seen(tried)[1] == 16
    assert len(sizes.seen) == 6
    # As long as another phase takes the most, the peak does not grow, and says nothing.
    sizes = Sizes(900)
    sizes.set_up = 100
    assert sizes.largest("train.py", "{batch}")[0] == 900


@pytest.mark.parametrize("seed", range(40))
def test_a_need_that_grows_is_searched_in_few_runs(seed: int) -> None:
    generator = random.Random(seed)
    held, per, square = (generator.randint(*ends) for ends in ((0, 900), (1, 40), (0, 9)))
    square = square * (seed % 2)

    def need(number: int) -> int:
        return held + number * per // 8 + number * number * square // 50

    sizes = Sizes(generator.randint(need(20), need(5000)), need=need)
    largest, _ = sizes.largest("train.py", "--batch-size", "8")
    assert need(largest) <= sizes.most < need(largest + 1)
    assert len(sizes.seen) <= 20, sizes.seen
    assert len(set(sizes.seen)) == len(sizes.seen)


def test_a_script_that_fails_as_it_stands_is_tried_once() -> None:
    sizes = Sizes(100, refuses=lambda number: True)
    assert sizes.largest("train.py", "--batch-size", "16")[0] is None
    assert sizes.seen == [16]


def test_the_largest_leaves_the_room_that_it_is_told_to_and_counts_it_in_no_peak() -> None:
    largest, tried = Sizes(1000).largest("train.py", "--batch-size", "8", left=300 * MIB)
    assert largest == 700
    answer = next(each.answer for each in tried if each.number == largest)
    assert answer.context == 0
    assert answer.needed == 700 * MIB
    assert answer.headroom == 300 * MIB
