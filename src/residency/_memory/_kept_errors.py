"""The errors that an interactive session keeps: a notebook, IPython or the interpreter's prompt.

Python keeps the last error that was shown under `sys.last_value` and its like, and IPython under
names of its own besides, so that a debugger can look at it. With it live the frames that it left,
and every tensor that was a local there, until another error takes its place.
"""

from __future__ import annotations

import inspect
import sys
import traceback
import types
from collections.abc import Iterable, Iterator
from typing import Any

from residency._memory import _objects

_NAMES = ("last_exc", "last_value", "last_traceback")  # the first from Python 3.12 on
# What stands between the name of an error and the functions that it left, in a holder's path.
TRAIL = " traceback"
_OF_TRACEBACK = ("sys.last_traceback",)


def errors_kept(but: BaseException | None = None) -> list[tuple[object, str]]:
    """Returns the errors and tracebacks that a session keeps, each with a name that leads to it.

    Those that belong to one error stand one after the other, with one name.

    Args:
        but: An error that is on its way, which is left out with all that belongs to it.
    """
    left_out = {id(thing) for thing in _belonging(but)}
    found: dict[int, tuple[object, str]] = {}
    for thing, name in _roots():
        for part in _belonging(thing):
            if id(part) not in left_out:
                found.setdefault(id(part), (part, name))
    return list(found.values())


def let_go_of_errors() -> None:
    """Empties the functions that kept errors left; the errors and their text stay.

    A debugger that is started later shows no values of theirs. What still runs stays as it is.
    """
    _empty_frames(thing for thing, _ in errors_kept())


def let_go_of(error: BaseException) -> None:
    """Empties the functions that one error left, as `let_go_of_errors` does."""
    _empty_frames(_belonging(error))


def _empty_frames(things: Iterable[object]) -> None:
    """Empties the functions that tracebacks lead through, and that run no more."""
    for thing in list(things):
        if not isinstance(thing, types.TracebackType):
            continue
        traceback.clear_frames(thing)
        at: types.TracebackType | None = thing
        while at is not None:
            if at.tb_frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                # What a debugger once read stays in a dict until it is read anew, before 3.13.
                _ = at.tb_frame.f_locals
            at = at.tb_next


def kept_error_of(path: str) -> str | None:
    """Returns the part of a holder's path that names an error; None where it leads through none."""
    for name in _OF_TRACEBACK:
        if path.startswith(name):
            return name
    before, found, _ = path.partition(f"{TRAIL} -> ")
    return before if found else None


def _roots() -> Iterator[tuple[object, str]]:
    for name in _NAMES:
        yield getattr(sys, name, None), f"sys.{name}"
    shells: Any = sys.modules.get("IPython.core.interactiveshell")
    shell = getattr(getattr(shells, "InteractiveShell", None), "_instance", None)
    result = getattr(shell, "last_execution_result", None)
    yield getattr(result, "error_in_exec", None), "IPython's last result"
    yield getattr(getattr(shell, "InteractiveTB", None), "tb", None), "IPython's InteractiveTB.tb"


def _belonging(thing: object) -> Iterator[object]:
    """Yields an error or a traceback, and those that it leads to."""
    pending, seen = [thing], set()
    while pending:
        part = pending.pop(0)
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, BaseException):
            yield part
            pending += [_objects.slot(part, name) for name in ("__traceback__", "__cause__")]
            pending.append(_objects.slot(part, "__context__"))
        elif isinstance(part, types.TracebackType):
            yield part
            pending.append(part.tb_next)
