"""Calls inside of a call of the same thread that is not over.

A signal handler, a finalizer, a callback of the garbage collector or a method of the state runs in
the midst of whatever its thread is doing. A lock does not keep it out: it would wait for itself.
What such a call would find half done is marked here, and the stack of the thread says whether it
is under way: unlike a flag, that is right after an interrupt at whatever line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

from residency._errors import RefusedError

F = TypeVar("F", bound=Callable[..., Any])


class _Mark(NamedTuple):
    """A thing that is half done while a function runs.

    Attributes:
        part_of: What the caller knows it as.
        of_object: Whether that concerns calls of the same object alone.
    """

    part_of: str
    of_object: bool


_marks: dict[CodeType, _Mark] = {}


def half_done(part_of: str, *, of_object: bool = False) -> Callable[[F], F]:
    """Marks a function: until it returns, other calls of its thread find something half done.

    Args:
        part_of: What the caller knows it as, such as "a save".
        of_object: Whether that concerns calls of the same object alone.
    """

    def mark(function: F) -> F:
        _marks[function.__code__] = _Mark(part_of, of_object)
        return function

    return mark


def call_under_way(owner: object = None) -> str | None:
    """Returns what this thread has begun and not ended that a call now would find half done.

    Args:
        owner: Whose call it would be; None where those of all objects count.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        mark = _marks.get(frame.f_code)
        if mark is not None and (
            owner is None or not mark.of_object or frame.f_locals.get("self") is owner
        ):
            return mark.part_of
        frame = frame.f_back
    return None


def refuse_inside(call: str, owner: object = None) -> None:
    """Raises RefusedError where a call would be inside of one that is not over.

    Args:
        call: What was called.
        owner: As in ``call_under_way``.
    """
    outer = call_under_way(owner)
    if outer is not None:
        raise RefusedError(
            f"{call} was called inside of {outer} that is not over, on the same thread: by a "
            "signal handler, a finalizer or a method of the state. Nothing was done; let a signal "
            f"handler set a flag, and call {call} once the other call has returned."
        )
