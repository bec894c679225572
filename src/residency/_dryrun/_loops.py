"""Ends a script's own loops before they end themselves, so that what comes after them runs, too.

Python lets a trace function say which line of a frame is next, as debuggers do (``jump``). At the
head of a loop, where nothing that its body has opened is open, that is the line after the loop. A
loop that is the last of its function has no such line, and one that another tool traces is left.
"""

from __future__ import annotations

import ast
import dis
import functools
import linecache
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from types import CodeType, FrameType

from residency._dryrun._places import is_script

Follow = Callable[[FrameType, str, object], "Follow | None"]  # as `sys.settrace` has it
_Loop = ast.For | ast.While
_OPENING = ast.With | ast.AsyncWith | ast.Try  # are open again when their line comes a second time


@dataclass(frozen=True, slots=True)
class _Ending:
    """A loop of a frame: the lines at which it can be ended, and the line to go on with."""

    frame: FrameType
    heads: frozenset[int]
    target: int | None


class Loops:
    """The loops of the script that were ended."""

    def __init__(self) -> None:
        """Begins with none."""
        self._depths: Counter[tuple[CodeType, frozenset[int]]] = Counter()
        self._armed: dict[FrameType, _Ending] = {}

    @property
    def is_ending(self) -> bool:
        """Whether a loop is about to end: the line at its head has yet to come."""
        return bool(self._armed)

    def forget(self) -> None:
        """Starts anew: the script trains on."""
        self._depths.clear()

    def end(self) -> bool:
        """Ends the innermost loop that led here, a second time the one around it as well.

        Returns:
            Whether it will end.
        """
        if sys.gettrace() is not None:
            return False
        endings = list(_endings(sys._getframe(1)))
        if not endings:
            return False
        innermost = endings[0]
        key = innermost.frame.f_code, innermost.heads
        self._depths[key] += 1
        chosen = endings[: self._depths[key]]
        if len(chosen) < self._depths[key] or any(each.target is None for each in chosen):
            return False
        for each in chosen:  # the outermost of a frame has the last word
            known = self._armed.get(each.frame)
            heads = each.heads if known is None else each.heads | known.heads
            self._armed[each.frame] = _Ending(each.frame, heads, each.target)
            each.frame.f_trace = self._follow
        sys.settrace(_ignore)
        return True

    def _follow(self, frame: FrameType, event: str, argument: object) -> Follow | None:
        ending = self._armed.get(frame)
        if ending is None:
            return None
        if event == "line" and frame.f_lineno in ending.heads:
            with suppress(ValueError):  # no way there: the next step leaves the script
                setattr(frame, "f_lineno", ending.target)  # noqa: B010 - typeshed says read-only
        elif event != "return":
            return self._follow
        del self._armed[frame]
        if not self._armed:
            sys.settrace(None)
        return None


def is_asked_by_script(frame: FrameType) -> bool:
    """Returns whether a frame is the script's, and in a call such as ``next``: no loop, which would
    end where there is nothing more.
    """
    code = frame.f_code
    operation = dis.opname[code.co_code[frame.f_lasti]]
    return is_script(code.co_filename) and operation not in ("FOR_ITER", "SEND")


def _ignore(frame: FrameType, event: str, argument: object) -> None:
    return None


def _endings(frame: FrameType | None) -> Iterator[_Ending]:
    """Yields the loops of the script around a call, the innermost first."""
    while frame is not None:
        code = frame.f_code
        if is_script(code.co_filename):
            path = _path(code, frame.f_lineno)
            for number in reversed(range(len(path) - 1)):
                loop = path[number].statement
                if isinstance(loop, _Loop) and path[number + 1].field == "body":
                    yield _Ending(frame, _heads(loop), _line_after(path, number))
        frame = frame.f_back


@dataclass(frozen=True, slots=True)
class _Stop:
    """A statement on the way to a line: where it stands, and what comes after it there."""

    statement: ast.stmt
    parent: ast.AST
    field: str
    following: ast.stmt | None


@functools.lru_cache(maxsize=64)
def _tree(file: str) -> ast.Module:
    return ast.parse("".join(linecache.getlines(file)))


def _path(code: CodeType, line: int) -> list[_Stop]:
    scope: ast.AST = _tree(code.co_filename)
    if code.co_name != "<module>":
        scopes = (ast.FunctionDef, ast.AsyncFunctionDef)
        found = [
            node
            for node in ast.walk(scope)
            if isinstance(node, scopes)
            and node.name == code.co_name
            and _first(node) == code.co_firstlineno
        ]
        if not found:
            return []
        scope = found[0]
    path: list[_Stop] = []
    while True:
        step = _step(scope, line)
        if step is None or isinstance(step.statement, ast.FunctionDef | ast.ClassDef):
            return path
        path.append(step)
        scope = step.statement


def _step(scope: ast.AST, line: int) -> _Stop | None:
    for field in ("body", "orelse", "finalbody"):
        block = getattr(scope, field, None) or []
        for statement, following in zip_longest(block, block[1:]):
            if _first(statement) <= line <= (statement.end_lineno or line):
                return _Stop(statement, scope, field, following)
    return None


def _first(statement: ast.stmt) -> int:
    above: list[ast.expr] = []
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        above = statement.decorator_list
    return min([statement.lineno, *(each.lineno for each in above)])


def _heads(loop: _Loop) -> frozenset[int]:
    """Returns the lines that come once for each round, with nothing of the body open."""
    first = loop.body[0]
    opening = () if isinstance(first, _OPENING) else (_first(first),)
    return frozenset((loop.lineno, *opening))


def _line_after(path: list[_Stop], number: int) -> int | None:
    for step in reversed(path[: number + 1]):
        if step.following is not None:
            return _first(step.following)
        if isinstance(step.parent, _Loop) and step.field == "body":
            return step.parent.lineno
        if not isinstance(step.parent, ast.If):
            return None  # the end of a function, or of a block that is to be closed
    return None
