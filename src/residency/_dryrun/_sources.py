"""The source of a script, by its places: which pieces of it a statement hangs on."""

from __future__ import annotations

import ast
import collections
import itertools
import linecache
import os
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any, NamedTuple

import torch

TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_CHANGERS = frozenset({"add", "append", "extend", "insert", "put", "setdefault", "update"})

Span = tuple[int, int, int, int]  # line, last line, column, last column, as code has it


class _Value(NamedTuple):
    """A piece of code that gives a name, or an attribute, its value, and the function it is in."""

    scope: ast.AST | None
    piece: ast.AST


def span_of(code: CodeType, instruction: int) -> Span | None:
    """Returns where an instruction stands in the source; None where that is not known."""
    found: Any = next(itertools.islice(code.co_positions(), instruction // 2, None), None)
    return None if found is None or None in found else found


def place_in(piece: Any) -> Span:
    """Returns where a piece of the source stands."""
    return piece.lineno, piece.end_lineno, piece.col_offset, piece.end_col_offset


def has(piece: Any, span: Span) -> bool:
    """Returns whether a piece of the source has a place in it."""
    first, last, begin, end = place_in(piece)
    line, last_line, column, last_column = span
    return (first, begin) <= (line, column) and (last_line, last_column) <= (last, end)


class Parsed:
    """A file of Python: which pieces of it a statement hangs on."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
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
    def of(cls, file: str) -> Parsed | None:
        """Reads a file; None where it is none of Python."""
        try:
            return cls(ast.parse("".join(linecache.getlines(file))))
        except (SyntaxError, ValueError):
            return None

    def statement(self, span: Span) -> list[ast.AST]:
        """Returns what the statement at a place computes, and the tests around it."""
        around = [n for n in ast.walk(self.tree) if isinstance(n, ast.stmt) and has(n, span)]
        return [*_heads(around[-1]), *self._tests(around[-1])] if around else []

    def call(self, span: Span) -> ast.Call | None:
        """Returns the call that is at a place; None where another piece of code is."""
        found = [n for n in ast.walk(self.tree) if isinstance(n, ast.Call) and has(n, span)]
        return found[-1] if found and place_in(found[-1]) == span else None

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

    def outer(self, node: ast.AST) -> ast.AST | None:
        """Returns what a node stands in."""
        return self._outer.get(node)

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
