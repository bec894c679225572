"""Whose doing an error is, as far as that can be known: a dry run lacks things, makes objects in
the place of others, and computes nothing.

That a value was not computed is evidence and no proof, so what is said of it says "may". Who read
one is known from the simulator (``[Note: guesses]`` in its sources): each call that led there is a
place. A place stands behind an error where it lies in the statement that failed, in what gave its
names their values, or in the test of a branch around one of these.
"""

from __future__ import annotations

import ast
import collections
import dis
import itertools
import linecache
import os
import re
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import Any, NamedTuple

import torch

from residency._dryrun._paths import givers, path_of
from residency._dryrun._places import is_ours, is_script, line_of, outwards
from residency._dryrun._refusals import chain

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_HERE = ("residency_sim_core", "residency.sim", "residency._dryrun")
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_ROOMS = tuple(os.path.join(_PACKAGE, name, "") for name in ("sim", "_dryrun"))
_REFUSES = re.compile(r"^Dry mode|^The simulated accelerator|residency_sim_core")
_OF_HOST = re.compile(r'"\w*cpu\w*" not implemented for')
_ON_GPU = "on a GPU it may go on"
_LACKED = f"The dry run lacks this: {_ON_GPU}"
_HOSTS = (
    "This is a kernel of the host's: if the tensors were on the device, the dry run lacks it, and "
    "a GPU has it"
)
# What was guessed of values, and what of it the answer says.
_GUESSES = {
    "mask": "took a mask as all true",
    "each": "took all values to differ",
    "one": "took all values to be one",
    "repeats": "took each row once",
}
_NOTES = {
    "mask": "a mask was taken as all true; the figures from there are an upper bound",
    "each": "all values were taken to differ; the figures from there are an upper bound",
    "one": "torch.unique was taken to find one value; the figures from there may be too low",
    "repeats": "each row was taken once, as repeats are not known; the figures from there may be "
    "too low",
}
_LEFT_ALONE = "anything"  # stood for it: memory of the host, with what it had before
_MOST_NOTES = 5
_CHANGERS = frozenset({"add", "append", "extend", "insert", "put", "setdefault", "update"})

_Span = tuple[int, int, int, int]  # line, last line, column, last column, as code has it


class _Value(NamedTuple):
    """A piece of code that gives a name, or an attribute, its value, and the function it is in."""

    scope: ast.AST | None
    piece: ast.AST


class Blame:
    """The record of what a script was given in the place of what a dry run does not have."""

    def __init__(self) -> None:
        """Begins with nothing."""
        # By instruction, of code that is kept: what stood there. Code of two files may be equal.
        self._places: dict[tuple[int, int], tuple[CodeType, str]] = {}
        self._guesses: collections.Counter[tuple[str, str]] = collections.Counter()

    def start(self, core: Any) -> None:
        """Listens to the simulator from now on."""
        core.attach_guess_observer(self._note)

    def _note(self, what: str, numel: int) -> None:
        frames = list(outwards(sys._getframe().f_back))  # none in a thread of autograd
        for frame in frames:
            self._places[id(frame.f_code), frame.f_lasti] = frame.f_code, what
        if what not in _GUESSES:
            return
        files = [frame.f_code.co_filename for frame in frames]
        asker = next((f for f in files if not f.startswith(_TORCH) and not is_ours(f)), "")
        # A library that asks which values there are only checks them.
        if what == "one" and not is_script(asker):
            return
        script = next((f for f in frames if is_script(f.f_code.co_filename)), None)
        if script is not None:
            place = line_of(script.f_code.co_filename, script.f_lineno)
            self._guesses[place, what] = max(self._guesses[place, what], numel)

    def guesses(self) -> list[dict[str, str]]:
        """Returns what sizes were guessed from, of the most values first."""
        most = self._guesses.most_common(_MOST_NOTES)
        return [{"line": place, "what": _NOTES[what]} for (place, what), _ in most]

    def of(self, error: BaseException, *, with_values: bool = True) -> str:
        """Returns what of the dry run stands behind an error; "" where nothing is known to.

        Args:
            error: What was raised.
            with_values: Whether a value that was not computed can be: not where the script is
                changed, and ends well as it is.
        """
        for each in chain(error):
            if found := self._lacked(each) or (with_values and self._unknown(each)):
                return found
        return ""

    def _lacked(self, error: BaseException) -> str:
        obj = getattr(error, "obj", None)
        owner = obj.__name__ if isinstance(obj, ModuleType) else type(obj).__module__
        if owner.startswith(_HERE) or _is_raised_here(error) or _REFUSES.search(str(error)):
            return _LACKED
        return _HOSTS if _OF_HOST.search(str(error)) else ""

    def _unknown(self, error: BaseException) -> str:
        """Looks for what was not computed behind the statement that failed, innermost first."""
        if not _can_be_of_value(error):
            return ""
        frames = list(_frames(error))
        # What a call has read that has not come back is of the frames inside of it.
        first = error.__traceback__.tb_frame.f_back if error.__traceback__ else None
        around = [(frame, frame.f_lasti) for frame in outwards(first)] + frames[:-1]
        open_calls = {(frame.f_code.co_filename, _span(frame.f_code, at)) for frame, at in around}
        sources: dict[str, _Parsed | None] = {}
        path, called = path_of(error), None
        needed: set[str] | None = None  # parameters of `called` on which the path hangs
        for frame, instruction in reversed(frames):
            inner, called = called, frame
            parameters, needed = needed, None
            file, failed = frame.f_code.co_filename, _span(frame.f_code, instruction)
            spans = {span: w for span, w in self._spans(file) if (file, span) not in open_calls}
            is_quiet = not spans and not path
            if is_quiet or failed is None or file.startswith(_TORCH) or is_ours(file):
                continue
            if file not in sources:
                sources[file] = _Parsed.of(file)
            source = sources[file]
            if source is None:
                continue
            call = source.call(failed) if path else None
            start = givers(call, inner, path, parameters) if call else source.statement(failed)
            pieces = list(source.behind(start, is_bound=bool(path)))
            if found := _read_in(pieces, spans):
                return _said(line_of(file, found[0][0]), found[1])
            needed = source.parameters(pieces)
            if path and not needed:
                return ""
        return ""

    def _spans(self, file: str) -> Iterator[tuple[_Span, str]]:
        """Yields where a file has read what is not computed, and what stood there."""
        for (_, instruction), (code, what) in list(self._places.items()):
            if code.co_filename == file and (span := _span(code, instruction)) is not None:
                yield span, what


def _read_in(pieces: Iterable[ast.AST], spans: dict[_Span, str]) -> tuple[_Span, str] | None:
    """Returns where pieces have read what is not computed, the first, and what stood there."""
    found = ((span, spans[span]) for piece in pieces for span in spans if _has(piece, span))
    return next(found, None)


def _said(place: str, what: str) -> str:
    if what == _LEFT_ALONE:
        return (
            f"{place} copied values to the host that a dry run does not compute, so that they mean "
            f"nothing: {_ON_GPU}"
        )
    if what in _GUESSES:
        return f"{place} {_GUESSES[what]}, as a dry run does not compute them: {_ON_GPU}"
    return f"{place} read a value that a dry run does not compute ({what} stood for it): {_ON_GPU}"


def _is_raised_here(error: BaseException) -> bool:
    """Returns whether the simulator or the dry run raised an error, and not what they go around.

    What they raise themselves are CUDA's own errors, but for refusals.
    """
    frame, instruction = next(reversed(list(_frames(error))), (None, 0))
    if frame is None or not frame.f_code.co_filename.startswith(_ROOMS):
        return False
    name = dis.opname[frame.f_code.co_code[instruction]]
    if name.startswith("RAISE"):
        return isinstance(error, NotImplementedError)
    return "CALL" not in name


def _can_be_of_value(error: BaseException) -> bool:
    """Returns whether a value can be behind an error: a placeholder has the right type and name,
    unless a branch left nothing in its place.
    """
    if isinstance(error, TypeError | AttributeError):
        return "NoneType" in str(error)
    is_of_name = isinstance(error, NameError) and not isinstance(error, UnboundLocalError)
    others = (ImportError, SyntaxError, torch.OutOfMemoryError)
    return isinstance(error, Exception) and not is_of_name and not isinstance(error, others)


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        yield trace.tb_frame, trace.tb_lasti
        trace = trace.tb_next


def _span(code: CodeType, instruction: int) -> _Span | None:
    found: Any = next(itertools.islice(code.co_positions(), instruction // 2, None), None)
    return None if found is None or None in found else found


def _place(piece: Any) -> _Span:
    return piece.lineno, piece.end_lineno, piece.col_offset, piece.end_col_offset


def _has(piece: Any, span: _Span) -> bool:
    first, last, begin, end = _place(piece)
    line, last_line, column, last_column = span
    return (first, begin) <= (line, column) and (last_line, last_column) <= (last, end)


class _Parsed:
    """A file of Python: which pieces of it a statement hangs on."""

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._outer = {
            inner: node for node in ast.walk(tree) for inner in ast.iter_child_nodes(node)
        }
        self._names: collections.defaultdict[str, list[_Value]] = collections.defaultdict(list)
        self._attributes: collections.defaultdict[str, list[_Value]]
        self._attributes = collections.defaultdict(list)
        for node in ast.walk(tree):
            for target, piece in _assignments(node):
                self._assign(target, piece)

    @classmethod
    def of(cls, file: str) -> _Parsed | None:
        try:
            return cls(ast.parse("".join(linecache.getlines(file))))
        except (SyntaxError, ValueError):
            return None

    def statement(self, span: _Span) -> list[ast.AST]:
        """Returns what the statement at a place computes, and the tests around it."""
        around = [n for n in ast.walk(self._tree) if isinstance(n, ast.stmt) and _has(n, span)]
        return [*_heads(around[-1]), *self._tests(around[-1])] if around else []

    def call(self, span: _Span) -> ast.Call | None:
        """Returns the call that is at a place; None where another piece of code is."""
        found = [n for n in ast.walk(self._tree) if isinstance(n, ast.Call) and _has(n, span)]
        return found[-1] if found and _place(found[-1]) == span else None

    def behind(self, pieces: Iterable[ast.AST], *, is_bound: bool = False) -> Iterator[ast.AST]:
        """Yields pieces, then what they hang on, each once.

        Args:
            pieces: To begin with.
            is_bound: Whether all names had a value: no branch decides of one that has one alone.
        """
        todo = collections.deque(pieces)
        seen: set[ast.AST] = set()
        while todo:
            piece = todo.popleft()
            if piece in seen:
                continue
            seen.add(piece)
            yield piece
            for values in self._values(piece):
                for value in values:
                    todo += [value, *(self._tests(value) if values[1:] or not is_bound else ())]

    def parameters(self, pieces: Iterable[ast.AST]) -> set[str]:
        """Returns the names in pieces that are parameters of a function around them."""
        names = (n for piece in pieces for n in ast.walk(piece) if isinstance(n, ast.Name))
        return {name.id for name in names if name.id in self._parameters_around(name)}

    def _parameters_around(self, node: ast.AST) -> Iterator[str]:
        while node in self._outer:
            node = self._outer[node]
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                yield from (n.arg for n in ast.walk(node.args) if isinstance(n, ast.arg))

    def _assign(self, target: ast.AST, piece: ast.AST) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            given = piece.elts if isinstance(piece, ast.Tuple | ast.List) else []
            parts = given if len(given) == len(target.elts) else []
            for index, each in enumerate(target.elts):
                self._assign(each, parts[index] if parts else piece)
        elif isinstance(target, ast.Name):
            self._names[target.id].append(_Value(self._scope(target), piece))
        elif isinstance(target, ast.Attribute):
            self._attributes[target.attr].append(_Value(None, piece))
        elif isinstance(target, ast.Subscript | ast.Starred):
            self._assign(target.value, piece)

    def _scope(self, node: ast.AST | None) -> ast.AST | None:
        """Returns the function that a node is in; None for the module."""
        while node is not None:
            node = self._outer.get(node)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                return node
        return None

    def _tests(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yields the tests of the branches around a node, in its function."""
        while (outer := self._outer.get(node)) is not None:
            if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef):
                return
            if isinstance(outer, ast.If | ast.IfExp) and node is not outer.test:
                yield outer.test
            node = outer

    def _values(self, piece: ast.AST) -> Iterator[list[ast.AST]]:
        """Yields of each name in a piece what gave it its values."""
        scopes: list[ast.AST | None] = [self._scope(piece)]
        while scopes[-1] is not None:
            scopes.append(self._scope(scopes[-1]))
        for node in ast.walk(piece):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                values = self._names.get(node.id, ())
                scope = next((s for s in scopes if any(v.scope is s for v in values)), None)
                yield [value.piece for value in values if value.scope is scope]
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                yield [value.piece for value in self._attributes.get(node.attr, ())]


def _heads(statement: ast.stmt) -> list[ast.AST]:
    """Returns what a statement computes: no message, no container that it puts something into, and
    no other statements inside of it.
    """
    if isinstance(statement, ast.Raise):
        return []
    if isinstance(statement, ast.Assign):
        keys = [each.slice for each in statement.targets if isinstance(each, ast.Subscript)]
        return [statement.value, *keys]
    if not isinstance(statement, ast.Assert) and not hasattr(statement, "body"):
        return [statement]
    names = ("test", "iter", "items", "subject")
    found = [vars(statement)[name] for name in names if name in vars(statement)]
    pieces = itertools.chain(*(each if isinstance(each, list) else [each] for each in found))
    return [each.context_expr if isinstance(each, ast.withitem) else each for each in pieces]


def _assignments(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yields what a node gives a value, and the value."""
    if isinstance(node, ast.Assign):
        yield from ((target, node.value) for target in node.targets)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.NamedExpr):
        if node.value is not None:
            yield node.target, node.value
    elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        yield node.target, node.iter
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield node.optional_vars, node.context_expr
    elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in _CHANGERS:
        changed = vars(node.func)["value"]
        yield from ((changed, each) for each in node.args)
        yield from ((changed, keyword.value) for keyword in node.keywords)
