"""Ends a script's own loops before they end themselves, so that what comes after them runs, too.

Python lets a trace function say which line of a frame is next, as debuggers do (``jump``). At the
head of a loop, where nothing that its body has opened is open, that is the line after the loop. A
loop that is the last of its function has no such line; where the script has nothing to do after it
at all, it is left at the loop's head. One that another tool traces goes on.
"""

from __future__ import annotations

import ast
import dis
import functools
import linecache
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from types import CodeType, FrameType
from typing import NoReturn

from residency._dryrun._places import is_script

Follow = Callable[[FrameType, str, object], "Follow | None"]  # as `sys.settrace` has it
Key = tuple[CodeType, int]  # a loop: its function and its line
_Loop = ast.For | ast.While
_OPENING = (ast.With, ast.AsyncWith, ast.Try)  # are open again when their line comes a second time


@dataclass(frozen=True, slots=True)
class _Ending:
    """A loop of a frame: the lines at which it can be ended, and the line to go on with.

    Attributes:
        key: Which loop it is.
        heads: Lines that come once for each round, with nothing of the body open.
        starts: Those of them where another loop begins, whose own rounds come by them, too.
    """

    frame: FrameType
    key: Key
    heads: frozenset[int]
    starts: frozenset[int]
    target: int | None

    def is_at_head(self) -> bool:
        """Returns whether the frame's next line begins a round."""
        line = self.frame.f_lineno
        operation = dis.opname[self.frame.f_code.co_code[self.frame.f_lasti]]
        return line in self.heads and not (line in self.starts and operation == "FOR_ITER")


class Loops:
    """The loops of the script that were ended."""

    def __init__(self, leave: Callable[[], NoReturn]) -> None:
        """Begins with none.

        Args:
            leave: Raises what leaves a script that has nothing more to do.
        """
        self._depths: Counter[Key] = Counter()
        self._armed: dict[FrameType, list[_Ending]] = {}  # of each frame, the innermost loop first
        self._leave = leave

    @property
    def is_ending(self) -> bool:
        """Whether a loop is about to end: the line at its head has yet to come."""
        return bool(self._armed)

    def forget(self) -> None:
        """Starts anew: the script trains on."""
        self._depths.clear()
        if self._armed:
            self._armed.clear()
            sys.settrace(None)

    def around(self) -> frozenset[Key]:
        """Returns the loops of the script around a call."""
        return frozenset(each.key for each in _endings(sys._getframe(1)))

    def headed(self) -> frozenset[Key]:
        """Returns the loops of the script that are about to begin: a call is in their line."""
        return frozenset(_headed(sys._getframe(1)))

    def end_all(self, but: Collection[Key]) -> None:
        """Ends the loops that led here at their heads, each once its round is done.

        One that can be neither ended nor left goes on, and so do those around it.

        Args:
            but: Loops to leave as they are.
        """
        if _is_traced():
            return
        for each in _endings(sys._getframe(1)):
            if each.key in but:
                continue
            if each.target is None and not _is_last(each):
                return
            beside = [e for e in self._armed.get(each.frame, []) if e.key != each.key]
            self._arm(each, beside=beside)

    def end(self) -> bool:
        """Ends the innermost loop that led here, a second time the one around it as well.

        Returns:
            Whether it will end.
        """
        if _is_traced():
            return False
        endings = list(_endings(sys._getframe(1)))
        if not endings:
            return False
        key = endings[0].key
        self._depths[key] += 1
        chosen = endings[: self._depths[key]]
        if len(chosen) < self._depths[key] or any(each.target is None for each in chosen):
            return False
        for each in chosen:  # the outermost of a frame has the last word
            beside = self._armed.get(each.frame, [])
            heads = each.heads.union(*(other.heads for other in beside))
            starts = each.starts.union(*(other.starts for other in beside)) - {each.key[1]}
            self._arm(replace(each, heads=heads, starts=starts), beside=[])
        return True

    def _arm(self, ending: _Ending, *, beside: list[_Ending]) -> None:
        self._armed[ending.frame] = [*beside, ending]
        ending.frame.f_trace = self._follow
        sys.settrace(_ignore)

    def _follow(self, frame: FrameType, event: str, argument: object) -> Follow | None:
        endings = self._armed.get(frame)
        if endings is None:
            return None
        if event == "line":
            for ending in endings:
                if ending.is_at_head():
                    endings.remove(ending)
                    self._end(ending)
                    break
        if endings and event != "return":
            return self._follow
        del self._armed[frame]
        if not self._armed:
            sys.settrace(None)
        return None

    def _end(self, ending: _Ending) -> None:
        if ending.target is None:
            self._leave()
        with suppress(ValueError):  # no way there: the next step leaves the script
            setattr(ending.frame, "f_lineno", ending.target)  # noqa: B010 - typeshed: read-only


def _is_traced() -> bool:
    """Returns whether another tool, such as a debugger, traces this thread."""
    return sys.gettrace() not in (None, _ignore)


def is_asked_by_script(frame: FrameType) -> bool:
    """Returns whether a frame is the script's, and in a call such as ``next``: no loop, which would
    end where there is nothing more.
    """
    code = frame.f_code
    operation = dis.opname[code.co_code[frame.f_lasti]]
    return is_script(code.co_filename) and operation not in ("FOR_ITER", "SEND")


def _ignore(frame: FrameType, event: str, argument: object) -> None:
    return None


def _headed(frame: FrameType | None) -> Iterator[Key]:
    for each, path in _paths(frame):
        if path and isinstance(path[-1].statement, ast.For):
            yield each.f_code, path[-1].statement.lineno


def _endings(frame: FrameType | None) -> Iterator[_Ending]:
    """Yields the loops of the script around a call, the innermost first."""
    for each, path in _paths(frame):
        for number in reversed(range(len(path) - 1)):
            loop = path[number].statement
            if isinstance(loop, _Loop) and path[number + 1].field == "body":
                yield _ending(each, path, number, loop)


def _paths(frame: FrameType | None) -> Iterator[tuple[FrameType, list[_Stop]]]:
    """Yields the script's frames that led to a call, the innermost first, with the way to the line
    of each.
    """
    while frame is not None:
        if is_script(frame.f_code.co_filename):
            yield frame, _path(frame.f_code, frame.f_lineno)
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


def _ending(frame: FrameType, path: list[_Stop], number: int, loop: _Loop) -> _Ending:
    first = loop.body[0]
    opening = () if isinstance(first, (*_OPENING, ast.While)) else (_first(first),)
    starts = frozenset(opening if isinstance(first, ast.For) else ())
    heads = frozenset((loop.lineno, *opening))
    return _Ending(frame, (frame.f_code, loop.lineno), heads, starts, _line_after(path, number))


def _is_last(ending: _Ending) -> bool:
    """Returns whether the script has nothing to do after a loop, and the calls that led there."""
    path = _path(ending.frame.f_code, ending.frame.f_lineno)
    lines = [step.statement.lineno for step in path]
    here = path[: lines.index(ending.key[1]) + 1]
    return _is_at_end(here) and all(_is_at_end(each) for _, each in _paths(ending.frame.f_back))


def _is_at_end(path: list[_Stop]) -> bool:
    """Returns whether the last statement of a path is the last one of its function."""
    blocks = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.If)
    return bool(path) and all(
        step.following is None and isinstance(step.parent, blocks) for step in path
    )


def _line_after(path: list[_Stop], number: int) -> int | None:
    for step in reversed(path[: number + 1]):
        if step.following is not None:
            return _first(step.following)
        if isinstance(step.parent, _Loop) and step.field == "body":
            return step.parent.lineno
        if not isinstance(step.parent, ast.If):
            return None  # the end of a function, or of a block that is to be closed
    return None
