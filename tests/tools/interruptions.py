"""Raises an exception at the n-th line of the library that a call runs, for every n in turn.

What a signal, a failed allocation or a bug may do anywhere, done everywhere. Only the calling
thread is interrupted, as by a signal; only lines under ``src/residency`` count, and none that a
finalizer runs, whose exceptions Python swallows.
"""

from __future__ import annotations

import dis
import itertools
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import residency

_ROOT = str(Path(residency.__file__).parent)
_FINALIZERS = ("__del__", "_finalize", "forget")  # the last is what a registry's reference calls


class Lines(int):
    """How many lines of the library a call ran; ``places`` has the file and number of each."""

    places: list[tuple[str, int]]

    def firsts_and_lasts(self) -> list[int]:
        """Returns when each line of the source ran for the first and for the last time."""
        first: dict[tuple[str, int], int] = {}
        last: dict[tuple[str, int], int] = {}
        for index, place in enumerate(self.places, start=1):
            first.setdefault(place, index)
            last[place] = index
        return sorted({*first.values(), *last.values()})


class _Tracer:
    """Counts lines of the library, and raises at one of them."""

    def __init__(self, at: int | None, error: BaseException | type[BaseException] | None) -> None:
        self.places: list[tuple[str, int]] = []
        self.where = ""
        self._at = at
        self._error = error

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(_ROOT) or _is_finalizing(frame):
            return None
        return self._line

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and not _is_leaving_a_with(frame) and not _is_at_a_handlers_edge(frame):
            self.places.append((frame.f_code.co_filename, frame.f_lineno))
            if len(self.places) == self._at:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                sys.settrace(None)
                self._happen()
        return self._line

    def _happen(self) -> None:
        assert self._error is not None
        raise self._error

    def let_go(self) -> None:
        """Keeps the exception, and so what its frames have, no longer."""
        self._error = None


class _Caller(_Tracer):
    """Calls a function at one of the lines, as Python calls the handler of a signal."""

    def __init__(self, at: int, handler: Callable[[], object]) -> None:
        super().__init__(at, None)
        self._handler = handler

    def _happen(self) -> None:
        self._handler()


def _is_leaving_a_with(frame: FrameType) -> bool:
    """Says whether a line begins with the call that ends a ``with``: its line is met once more
    there, outside of what the ``with`` guards, and Python takes no signal between the two.
    """
    code = frame.f_code
    at = frame.f_lasti
    if dis.opname[code.co_code[at]] == "SWAP":  # with a value to return beneath
        at += 2
    loads = code.co_code[at : at + 6]
    is_thrice = len(loads) == 6 and loads[:2] == loads[2:4] == loads[4:]
    is_load = dis.opname[loads[0]] == "LOAD_CONST"
    return is_thrice and is_load and code.co_consts[loads[1]] is None


def _is_at_a_handlers_edge(frame: FrameType) -> bool:
    """Returns whether an ``except`` begins or ends here. Python takes no signal there, and Python
    3.11 would handle the caught exception for good, with all frames up to the caller's.
    """
    opname = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    return opname in ("PUSH_EXC_INFO", "POP_EXCEPT")


def _is_finalizing(frame: FrameType | None) -> bool:
    while frame is not None:
        code = frame.f_code
        if code.co_name in _FINALIZERS or code.co_filename.endswith("weakref.py"):
            return True
        frame = frame.f_back
    return False


def count_lines(action: Callable[[], Any]) -> Lines:
    """Runs an action undisturbed and returns how many lines of the library it ran here."""
    tracer = _Tracer(None, None)
    _traced(tracer, action)
    lines = Lines(len(tracer.places))
    lines.places = tracer.places
    return lines


def interrupted_at(
    line: int, action: Callable[[], Any], error: BaseException | type[BaseException]
) -> str:
    """Runs an action and raises ``error`` at its ``line``-th line of the library.

    Returns:
        Where it was raised and came out again, as it was or, of an allocation of host memory that
        fails, as the cause of a ``RefusedError``; "" where the action was over before, or the
        exception was taken for something that the action goes on after. Another exception is let
        out.
    """
    tracer = _Tracer(line, error)
    kind = error if isinstance(error, type) else type(error)
    try:
        _traced(tracer, action)
    except (kind, residency.RefusedError) as caught:
        chain: list[BaseException] = [caught]
        while (before := chain[-1].__cause__ or chain[-1].__context__) is not None:
            chain.append(before)
        if not tracer.where or not any(isinstance(each, kind) for each in chain):
            raise
        # Python 3.11 may keep a frame for good that its tracer left by an exception, as that of a
        # generator within `sum`: what the frame has, and the traceback, must not stay with it.
        for each in chain:
            traceback.clear_frames(each.__traceback__)
            each.__traceback__ = None
        return tracer.where
    finally:
        tracer.let_go()
    return ""


def called_at(line: int, action: Callable[[], Any], handler: Callable[[], object]) -> str:
    """Runs an action and calls a function at its ``line``-th line of the library; returns where."""
    tracer = _Caller(line, handler)
    _traced(tracer, action)
    return tracer.where


def spread(count: int, most: int, seed: int) -> Iterator[int]:
    """Yields all numbers from 1 to ``count``, or, where these are more than ``most``, one at random
    of each of ``most`` equal parts; the first and the last are always among them.

    ``RESIDENCY_TEST_LINES`` stands for ``most`` where it is set. ``each`` takes every line of the
    source, at its first and its last time.
    """
    wanted = os.environ.get("RESIDENCY_TEST_LINES") or str(most)
    if wanted == "each" and isinstance(count, Lines):
        yield from count.firsts_and_lasts()
        return
    most = count if wanted == "each" else int(wanted)
    if count <= most:
        yield from range(1, count + 1)
        return
    chance = random.Random(seed)
    edges = [1 + count * part // most for part in range(most + 1)]
    yield 1
    for low, high in itertools.pairwise(edges[1:]):
        yield chance.randrange(low, high)
    yield count


def _traced(tracer: _Tracer, action: Callable[[], Any]) -> None:
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        action()
    finally:
        sys.settrace(before)
