"""The loops of a script that are under way, each of which can be ended as Python ends one.

The script's code asks here before each round (``_rewriting``): a loop that is ended has no further
one, whatever it goes over. So its ``else`` runs, a context around it closes, and the script goes on
with what comes after it, if only with the end of the function.

Loaded by its path in processes that may never import torch: nothing but the standard library.
"""

from __future__ import annotations

import itertools
import operator
import sys
import threading
from collections.abc import Collection, ItemsView, Iterable, Iterator, KeysView
from types import FrameType

from residency._dryrun._places import is_generator, is_script, outwards

_MOST_NAMES = 16  # more are data

# The frame of a loop, and its code, by their ids: the frame itself would keep tensors. It is there
# for as long as its loops, but for a `map` that is handed on: the loop follows the frame that asks,
# and another function's frame that takes the memory meanwhile has other code.
_Place = tuple[int, int]
# Where a frame is: its code, what it runs there, and the rounds of its loops.
_Position = tuple[int, int, list[tuple[int, int]]]


def _place_of(frame: FrameType) -> _Place:
    return id(frame), id(frame.f_code)


class Loop:
    """A loop that is under way, from its first round on.

    Attributes:
        number: Of this loop alone.
        num_rounds: How many it has begun.
        is_ended: Whether it has no further one.
        is_asking: Whether it has asked for its next item, and has not got it.
        has_names: Whether it goes over a few names or numbers, as of phases: each of its rounds
            does something else.
        is_while: Whether it is a ``while`` loop.
        line: Where it stands: the file and the number of its line.
    """

    __slots__ = (
        "__weakref__",
        "_loops",
        "_place",
        "has_names",
        "is_asking",
        "is_ended",
        "is_while",
        "line",
        "num_rounds",
        "number",
    )

    def __init__(
        self,
        loops: Loops,
        frame: FrameType,
        *,
        has_names: bool = False,
        is_while: bool = False,
    ) -> None:
        self.number = next(loops.numbers)
        self.num_rounds = 0
        self.is_ended = False
        self.is_asking = False
        self.has_names = has_names
        self.is_while = is_while
        self.line = frame.f_code.co_filename, frame.f_lineno
        self._loops = loops
        self._place = _place_of(frame)

    def __enter__(self) -> Loop:
        self._loops.open(self._place, self)
        return self

    def __exit__(self, *error: object) -> None:
        self._loops.close(self._place, self)

    def follow(self, frame: FrameType) -> None:
        """Takes the frame that asks for the next item as the loop's, if another one did before."""
        place = _place_of(frame)
        if place != self._place:
            self._loops.move(self, self._place, place)
            self._place = place


class Loops:
    """The loops of a process's script that are under way.

    Attributes:
        cut: Those that were ended before their time, by their lines: the rounds that they had, and
            how many were left, or None where nothing says that. The last one that ended comes last.
        numbers: The numbers of those to come.
        entered: The branches in loops that were entered, which go by the rounds, by their lines.
    """

    def __init__(self) -> None:
        """Begins with none."""
        self.cut: dict[tuple[str, int], tuple[int, int | None]] = {}
        self.entered: set[tuple[str, int]] = set()
        self.numbers = itertools.count(1)
        self._open: dict[_Place, list[Loop]] = {}  # of each frame; the innermost comes last
        self._ending: set[Loop] = set()
        self._waits: list[_Position] | None = None  # for a library, where its loops are ended

    @property
    def is_ending(self) -> bool:
        """Whether a loop that has no further round is under way."""
        return bool(self._ending)

    # -------------------------------------------------------------- what the script's code asks

    def each(self, iterable: Iterable[object]) -> Iterator[object]:
        """Yields what a ``for`` loop goes over until the loop is ended."""
        return self._rounds(iterable, iter(iterable))

    def mapped(self, function: object, iterable: Iterable[object]) -> Iterable[object]:
        """Returns what ``map`` goes over until the loop is ended; as it is for another function."""
        is_loop = function is map or function is itertools.starmap
        return self.each(iterable) if is_loop else iterable

    def _rounds(self, iterable: Iterable[object], iterator: Iterator[object]) -> Iterator[object]:
        with Loop(self, sys._getframe(1), has_names=_are_names(iterable)) as loop:
            while not loop.is_ended:
                loop.follow(sys._getframe(1))
                loop.is_asking = True
                item = list(itertools.islice(iterator, 1))
                loop.is_asking = False
                if not item:
                    return
                loop.num_rounds += 1
                yield item.pop()  # the script alone keeps it
            self._note_cut(loop, _left_of(iterable, loop.num_rounds))

    def enter(self) -> None:
        """Notes that a branch is entered."""
        frame = sys._getframe(1)
        self.entered.add((frame.f_code.co_filename, frame.f_lineno))

    def repeat(self) -> Loop:
        """Returns the context of a ``while`` loop."""
        return Loop(self, sys._getframe(1), is_while=True)

    def goes_on(self) -> bool:
        """Returns whether the caller's ``while`` loop has a further round, and counts it."""
        here = reversed(self._open[_place_of(sys._getframe(1))])
        loop = next(each for each in here if each.is_while)  # a `map` may have been begun in it
        if loop.is_ended:
            self._note_cut(loop, None)
            return False
        loop.num_rounds += 1
        return True

    def _note_cut(self, loop: Loop, num_left: int | None) -> None:
        self.cut.pop(loop.line, None)
        if num_left != 0:
            self.cut[loop.line] = loop.num_rounds, num_left

    # ------------------------------------------------------------------------- what ends them

    def around(self) -> list[Loop]:
        """Returns the loops that led to a call, the innermost first.

        One that waits for an item of a generator with loops is none: it ends with them. The main
        thread's are around another's, as for autograd's, whose hooks make steps.
        """
        found, main = self._around(sys._getframe(1)), threading.main_thread().ident
        if main == threading.get_ident():
            return found
        return found + self._around(sys._current_frames().get(main or 0))

    def _around(self, frame: FrameType | None) -> list[Loop]:
        found: list[Loop] = []
        has_loops = False  # whether generators that the frame has asked are in loops
        while frame is not None and self._open:
            loops = self._open.get((id(frame), id(frame.f_code)), ())
            found += [each for each in reversed(loops) if not (each.is_asking and has_loops)]
            has_loops = (has_loops or bool(loops)) and is_generator(frame)
            frame = frame.f_back
        return found

    def end(self, numbers: Collection[int]) -> None:
        """Ends those loops of some numbers that led to a call, each once its round is done."""
        ended = [each for each in self.around() if each.number in numbers]
        self._waits = self._waiting_for(ended[-1])
        for loop in ended:
            loop.is_ended = True
        self._ending.update(ended)

    @property
    def are_in_library(self) -> bool:
        """Whether the library whose loops were ended last has not returned to the script yet.

        A loop of it that is not rewritten may be around them, and begin them anew.
        """
        if self._waits is None:
            return False
        here = self._positions(outwards(sys._getframe(1)))
        return here[len(here) - len(self._waits) :] == self._waits

    def _waiting_for(self, loop: Loop) -> list[_Position] | None:
        """Returns where the script waits for the library that a loop is of; None if it is its own.

        As each round of the script's loops is counted, it is there once.
        """
        frames = outwards(sys._getframe(1))
        for frame in frames:
            if loop in self._open.get(_place_of(frame), ()):
                break
        else:
            return None  # another thread's
        if is_script(frame.f_code.co_filename):
            return None
        outer = itertools.dropwhile(lambda each: not is_script(each.f_code.co_filename), frames)
        return self._positions(outer)

    def _positions(self, frames: Iterable[FrameType]) -> list[_Position]:
        return [
            (
                id(frame.f_code),
                frame.f_lasti,
                [(id(loop), loop.num_rounds) for loop in self._open.get(_place_of(frame), ())],
            )
            for frame in frames
        ]

    def go_on(self) -> None:
        """Gives further rounds to the loops that are in their last one."""
        for loop in self._ending:
            loop.is_ended = False
        self._ending.clear()

    def open(self, place: _Place, loop: Loop) -> None:
        """Takes a loop of a frame as under way."""
        self._open.setdefault(place, []).append(loop)

    def move(self, loop: Loop, place: _Place, to: _Place) -> None:
        """Takes a loop that is under way as one of another frame."""
        self._drop(place, loop)
        self.open(to, loop)

    def close(self, place: _Place, loop: Loop) -> None:
        """Takes it as over."""
        self._drop(place, loop)
        self._ending.discard(loop)

    def _drop(self, place: _Place, loop: Loop) -> None:
        loops = self._open[place]
        loops.remove(loop)
        if not loops:
            del self._open[place]


def _left_of(iterable: object, num_rounds: int) -> int | None:
    """Returns how many rounds are left of what a loop goes over; None where it does not say.

    An iterator of Python's own knows what is left; a list, a loader or a progress bar how many it
    has in all.
    """
    if isinstance(iterable, enumerate | zip | map):
        # A copy of one is made of what it goes over.
        parts: tuple[object, ...] = iterable.__reduce__()[1]  # type: ignore[assignment]
        known = [_left_of(each, num_rounds) for each in parts if isinstance(each, Iterator)]
        return min((each for each in known if each is not None), default=None)
    try:
        if hasattr(type(iterable), "__length_hint__"):
            return operator.length_hint(iterable)
        return max(0, len(iterable) - num_rounds)  # type: ignore[arg-type]
    except Exception:  # a class's own, of the script: one without a length may say so by any error
        return None


def _are_names(iterable: object) -> bool:
    if not isinstance(iterable, list | tuple | dict | KeysView | ItemsView):
        return False
    if len(iterable) > _MOST_NAMES:
        return False
    names = [key for key, _ in iterable] if isinstance(iterable, ItemsView) else iterable
    return all(isinstance(each, str | int | float) for each in names)


loops = Loops()
