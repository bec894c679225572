"""The loops that are known as under way are those that led to a call, and no others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from residency._dryrun._loops import Loop, Loops


class Around:
    """Loops, and a function that notes those that led to it."""

    def __init__(self) -> None:
        self.loops = Loops()
        self.seen: list[list[Loop]] = []

    def note(self, item: int) -> int:
        self.seen.append(self.loops.around())
        return item

    def mapped(self) -> Iterator[int]:
        return map(self.note, self.loops.mapped(map, range(9)))


@pytest.fixture
def around() -> Around:
    return Around()


def test_a_map_passed_to_another_function_is_a_loop_of_that_function(around: Around) -> None:
    batches = around.mapped()

    def take_first() -> int:
        return next(batches)

    def ask_for_none() -> list[Loop]:
        return around.loops.around()

    assert take_first() == 0
    (loop,) = around.seen[0]
    # Frames that are over leave their memory to the next ones.
    assert [ask_for_none() for _ in range(100)] == [[]] * 100
    assert next(batches) == 1
    assert around.seen[1] == [loop]
    assert around.loops.around() == [loop]
    assert list(batches) == [*range(2, 9)]
    assert around.loops.around() == []


def test_a_map_passed_to_another_function_ends_in_that_function(around: Around) -> None:
    batches = around.mapped()

    def take(number: int) -> list[int]:
        return [next(batches) for _ in range(number)]

    take(2)
    assert around.loops.around() == []
    assert next(batches) == 2
    (loop,) = around.loops.around()
    around.loops.end([loop.number])
    assert around.loops.is_ending
    assert list(batches) == []
    assert not around.loops.is_ending


def test_a_while_loop_counts_its_own_rounds(around: Around) -> None:
    batches = around.mapped()
    with around.loops.repeat() as loop:
        while around.loops.goes_on():
            if next(batches) == 2:  # the map was begun in the loop, and is not over
                loop.is_ended = True
    assert loop.num_rounds == 3  # it asks once more, and has no further round
    assert around.seen[0][0].num_rounds == 3
