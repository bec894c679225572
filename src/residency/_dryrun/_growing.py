"""Whether what the device holds grows with each step of a training, or with each pass of an
evaluation, and by which name.

Blocks have an age: the round of the training loop in which they were made. What was made in a round
and is still there two rounds later has outlived the values that a loop keeps from one batch to the
next. Where each of several rounds leaves such blocks, the script keeps them, and a run of more
steps needs more. The first round is left out, in which caches and states are made, and so is the
state of optimizers, some of which keep a history of a set length. So it is with passes without
gradients that come one after the other, of an evaluation that keeps its outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch

from residency._dryrun._books import Books
from residency._dryrun._owners import STATE
from residency._memory import find_holders, grouped, let_go_text, segment_bytes
from residency._units import MIB

_ROUNDS_OF_A_VALUE = 2  # a batch may be fetched a round before it is used
_FEWEST_ROUNDS = 3
_SHARE_OF_ROUNDS = 0.75  # that leave something
_LEAST_BYTES = MIB  # in all of these rounds
_SECONDS = 3.0  # of a search for names
_MOST_NAMES = 3
NUM_STEPS = 1 + _FEWEST_ROUNDS + _ROUNDS_OF_A_VALUE  # in which growth shows


class Growing:
    """The growth of one process's trainings.

    Attributes:
        found: Of the training that grew fastest, the bytes of each step and what the allocator
            takes for them, the steps seen and the names of what grows; None where nothing does.
    """

    def __init__(self, books: Books, num_steps: Callable[[], tuple[int, int]]) -> None:
        """Takes the books, whose blocks have an age from now on.

        Args:
            books: Those of the process.
            num_steps: Returns which training it is, and how many steps were made in all.
        """
        self.found: dict[str, Any] | None = None
        self._books = books
        self._num_steps = num_steps
        self._seen = num_steps()
        self._first = 0  # round of this training
        self._of_trainings = OfTrainings(books)

    @property
    def of_trainings(self) -> dict[str, Any] | None:
        """The bytes that each training leaves to the next, by name, and the number of trainings."""
        return self._of_trainings.found

    def look(self) -> None:
        """Takes in that a phase has ended; looks at the blocks where a step has, too."""
        training, steps = self._num_steps()
        if training != self._seen[0]:
            self._first = self._books.round
        elif steps == self._seen[1]:
            return
        if steps != self._seen[1]:
            self._of_trainings.see_step(training, self._first)
        self._seen = training, steps
        self._books.round += 1
        self._count(self._books.round - self._first)

    def _count(self, num_rounds: int) -> None:
        rounds = range(self._first + 1, self._books.round - _ROUNDS_OF_A_VALUE)
        if len(rounds) < _FEWEST_ROUNDS:
            return
        kept = _kept(self._books.made_in(rounds, but=STATE))
        if not kept:
            return
        a_step = sum(kept.values()) // len(rounds)
        if self.found is None or self.found["bytes_per_step"] < a_step:
            self.found = {
                "bytes_per_step": a_step,
                "reserved_bytes_per_step": sum(map(_reserved_for, kept.values())) // len(rounds),
                "steps": num_rounds,
                **_named(kept),
            }
        elif self.found["bytes_per_step"] == a_step:
            self.found["steps"] = num_rounds


class OfTrainings:
    """The growth from one training to the next, of models that a loop of folds or seeds keeps.

    Attributes:
        found: The fewest bytes by which the memory that is held after a first step grew from each
            training to the next, the trainings and the names of what they left; None where it did
            not grow each time.
    """

    def __init__(self, books: Books) -> None:
        """Takes the books."""
        self.found: dict[str, Any] | None = None
        self._books = books
        self._held: list[int] = []
        self._training = -1

    def see_step(self, training: int, first_round: int) -> None:
        """Takes in a step; the first one of a training counts.

        Args:
            training: Which one it is.
            first_round: The round of the books with which it began.
        """
        if training == self._training:
            return
        self._training = training
        self._held.append(self._books.held)
        grown = [after - before for before, after in itertools.pairwise(self._held[1:])]
        if len(grown) < _FEWEST_ROUNDS or min(grown) < _LEAST_BYTES:
            self.found = None
            return
        named: Mapping[str, object] | None = self.found
        if named is None:
            left = self._books.made_in(range(1, first_round), but=STATE)
            named = _named({a: size for blocks in left.values() for a, size in blocks.items()})
        size = {"bytes_per_training": min(grown), "trainings": len(self._held)}
        self.found = {"names": named["names"], "advice": named["advice"], **size}


class GrowingPasses:
    """The growth with passes without gradients that come one after the other.

    Attributes:
        found: Of those that left most in all, the bytes of each pass, how many passes there were,
            and the names of what grows; None where nothing does.
    """

    def __init__(self, books: Books) -> None:
        """Takes the books, which count the passes."""
        self._books = books
        self.found: dict[str, Any] | None = None
        self.begin_anew()

    def begin_anew(self) -> None:
        """Takes in a backward pass or a step: what was kept until then was not for an evaluation
        alone.
        """
        self._first = self._books.free_pass
        self._next = NUM_STEPS  # passes after which to look: names take time
        self._now: dict[str, Any] | None = None

    def end_pass(self) -> None:
        """Takes in that a pass has ended; looks at the blocks now and then."""
        self._books.end_free_pass()
        number = self._books.free_pass - self._first
        if number == self._next:
            self._next *= 2
            self._look(number)
        if self._now is None:
            return
        self._now["passes"] = number
        if self.found is None or _in_all(self.found) <= _in_all(self._now):
            self.found = self._now

    def _look(self, number: int) -> None:
        rounds = range(self._first + 1, self._first + number - _ROUNDS_OF_A_VALUE)
        kept = _kept(self._books.made_in(rounds, but=STATE, are_free_passes=True))
        if not kept:
            self._now = None
        elif self._now is None:
            a_pass = sum(kept.values()) // len(rounds)
            self._now = {"bytes_per_pass": a_pass, "passes": number, **_named(kept)}


def _in_all(found: Mapping[str, Any]) -> int:
    return int(found["bytes_per_pass"] * found["passes"])


def _kept(left: Mapping[int, Mapping[int, int]]) -> dict[int, int]:
    """Returns what rounds have left, bytes by address, where most of them have left something."""
    sizes = [sum(blocks.values()) for blocks in left.values()]
    is_steady = sum(map(bool, sizes)) >= _SHARE_OF_ROUNDS * len(sizes)
    if not is_steady or sum(sizes) < _LEAST_BYTES:
        return {}
    return {address: size for blocks in left.values() for address, size in blocks.items()}


def _reserved_for(num_bytes: int) -> int:
    """Returns a block's share of the segment that torch's allocator puts it into."""
    if num_bytes <= MIB:  # which many of them fill
        return num_bytes
    segment = segment_bytes(num_bytes)
    return segment // (segment // num_bytes)


def _named(addresses: Container[int]) -> Mapping[str, object]:
    """Returns by which names the storages at some addresses are held, and how to let go of them."""
    found = find_holders(torch.device("cuda", 0), 1, seconds=_SECONDS)
    groups = grouped(holder for holder in found if holder.address in addresses)
    return {
        "names": [group.path for group in groups[:_MOST_NAMES]],
        "advice": let_go_text(groups[0]) if groups else "",
    }
