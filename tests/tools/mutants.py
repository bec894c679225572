"""Finds the places of a source file where one small change would be a plausible bug.

A mutant is such a change, as replacements of text by the positions of the syntax tree: what stands
around it keeps its form. Messages of errors, annotations, decorators and f-strings are left alone.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

PACKAGES = ("_transfer", "_optim", "_checkpoint", "_handoff", "_memory")
KINDS = (
    "wait removed",
    "one off",
    "comparison turned",
    "condition negated",
    "finally dropped",
    "lock dropped",
    "stale buffer",
    "wrong stream",
    "fsync skipped",
    "arguments swapped",
    "early return",
    "and/or swapped",
)

_WAITS = re.compile(r"_?(wait|await|fence$|synchronize$|before_write$|before_free$)")
_SYNCS = re.compile(r"f(data)?sync$|sync_folder$")
_COPIES = re.compile(r"(copy_|_foreach_copy_|_copy_batch|_copy_group|_copy_to_others)$")
_LOCKS = re.compile(r"(?<![a-z])(r?lock|condition|guard)", re.IGNORECASE)
_STREAMS = {"d2h": "h2d", "h2d": "d2h"}
# Whose arguments mean the same in either order, or fail at once for a type's sake.
_SYMMETRIC = {"isinstance", "issubclass", "hasattr", "getattr", "setattr", "cast", "min", "max"}
_TURNS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.IsNot: (r"is\s+not", "is"),
    ast.Is: ("is", "is not"),
    ast.NotIn: (r"not\s+in", "in"),
    ast.In: ("in", "not in"),
}
# The statement before the changed one, by which a run tells whether it came there.
_MARK = b'__import__("sys").mutant_was_reached = True'


@dataclass(frozen=True)
class Edit:
    """Text in place of the bytes from ``start`` to ``end``."""

    start: int
    end: int
    text: bytes


@dataclass(frozen=True)
class Mutant:
    """One change of one file. ``place`` is where the statement begins that holds it, or None;
    ``lines`` are those from there to the change.
    """

    package: str
    file: str
    line: int
    column: int
    kind: str
    was: str
    now: str
    edits: tuple[Edit, ...]
    place: int | None
    lines: range

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}:{self.column} {self.kind}: {self.was} -> {self.now}"


class _Source:
    """A file's bytes, its tree, and the parent of each node."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.tree = ast.parse(content)
        self.parents: dict[ast.AST, ast.AST] = {}
        for node in ast.walk(self.tree):
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
        lengths = [len(line) for line in content.split(b"\n")]
        self._begins = [0]
        for length in lengths:
            self._begins.append(self._begins[-1] + length + 1)

    def start(self, node: ast.AST) -> int:
        return self._begins[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]

    def end(self, node: ast.AST) -> int:
        return self._begins[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def text(self, node: ast.AST) -> bytes:
        return self.content[self.start(node) : self.end(node)]

    def replace(self, node: ast.AST, text: bytes) -> tuple[Edit, ...]:
        return (Edit(self.start(node), self.end(node), text),)

    def place(self, node: ast.AST) -> int | None:
        """Returns where the statement around ``node`` begins, if a statement fits before it."""
        at: ast.AST | None = node
        while at is not None:
            if isinstance(at, ast.stmt):
                begin = self._begins[at.lineno - 1]
                is_alone = not self.content[begin : self.start(at)].strip()
                is_elif = self.text(at).startswith(b"elif")
                if is_alone and not is_elif and not getattr(at, "decorator_list", None):
                    return self.start(at)
            at = self.parents.get(at)
        return None


T = TypeVar("T")
Found = Iterator[tuple[str, ast.AST, tuple[Edit, ...]]]


def _called(node: ast.AST) -> str:
    """Returns the last name of what a call calls, or nothing."""
    function = node.func if isinstance(node, ast.Call) else None
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _dropped_calls(source: _Source, node: ast.AST) -> Found:
    if isinstance(node, ast.Expr):
        name = _called(node.value)
        kinds = ((_WAITS, "wait removed"), (_SYNCS, "fsync skipped"), (_COPIES, "stale buffer"))
        for pattern, kind in kinds:
            if pattern.match(name):
                yield kind, node, source.replace(node, b"pass")
    elif _called(node) == "copy_" and not isinstance(source.parents[node], ast.Expr):
        assert isinstance(node, ast.Call)
        if isinstance(node.func, ast.Attribute):
            yield "stale buffer", node, source.replace(node, source.text(node.func.value))


def _off_by_one(source: _Source, node: ast.AST) -> Found:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield "one off", node, source.replace(node, str(node.value + 1).encode())
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and "offset" in node.id:
        whole = ast.BinOp | ast.Slice | ast.Call | ast.Compare
        if isinstance(source.parents[node], whole):
            yield "one off", node, source.replace(node, b"(" + source.text(node) + b" + 1)")


def _turned(source: _Source, node: ast.AST) -> Found:
    if not isinstance(node, ast.Compare):
        return
    lefts = [node.left, *node.comparators[:-1]]
    for left, operator, right in zip(lefts, node.ops, node.comparators, strict=True):
        old, new = _TURNS[type(operator)]
        start, end = source.end(left), source.start(right)
        between = re.sub(old.encode(), new.encode(), source.content[start:end], count=1)
        yield "comparison turned", node, (Edit(start, end, between),)


def _negated(source: _Source, node: ast.AST) -> Found:
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        test = node.test
        yield "condition negated", test, source.replace(test, b"(not (" + source.text(test) + b"))")


def _swapped_operators(source: _Source, node: ast.AST) -> Found:
    if not isinstance(node, ast.BoolOp):
        return
    old, new = (b"and", b"or") if isinstance(node.op, ast.And) else (b"or", b"and")
    edits = [Edit(source.start(node), source.start(node), b"(")]
    for left, right in zip(node.values, node.values[1:], strict=False):
        start, end = source.end(left), source.start(right)
        edits.append(Edit(start, end, source.content[start:end].replace(old, new, 1)))
    edits.append(Edit(source.end(node), source.end(node), b")"))
    yield "and/or swapped", node, tuple(edits)


def _dropped_blocks(source: _Source, node: ast.AST) -> Found:
    if isinstance(node, ast.Try) and node.finalbody:
        start, end = source.start(node.finalbody[0]), source.end(node.finalbody[-1])
        yield "finally dropped", node.finalbody[0], (Edit(start, end, b"pass"),)
    if isinstance(node, ast.With):
        for item in node.items:
            text = source.text(item.context_expr)
            if item.optional_vars is None and _LOCKS.search(text.decode()):
                free = b'__import__("contextlib").nullcontext()'
                yield "lock dropped", item.context_expr, source.replace(item.context_expr, free)


def _swapped_names(source: _Source, node: ast.AST) -> Found:
    if isinstance(node, ast.Attribute) and node.attr in _STREAMS:
        end = source.end(node)
        edit = Edit(end - len(node.attr), end, _STREAMS[node.attr].encode())
        yield "wrong stream", node, (edit,)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in _STREAMS:
        yield "wrong stream", node, source.replace(node, _STREAMS[node.id].encode())


def _swapped_arguments(source: _Source, node: ast.AST) -> Found:
    if not isinstance(node, ast.Call) or len(node.args) < 2 or _called(node) in _SYMMETRIC:
        return
    first, second = node.args[:2]
    if isinstance(first, ast.Starred) or isinstance(second, ast.Starred):
        return
    texts = source.text(first), source.text(second)
    if texts[0] != texts[1]:
        edits = source.replace(first, texts[1]) + source.replace(second, texts[0])
        yield "arguments swapped", node, edits


def _early_return(source: _Source, node: ast.AST) -> Found:
    if not isinstance(node, ast.FunctionDef) or node.returns is None or node.name == "__init__":
        return
    if not re.search(r"\bNone\b", ast.unparse(node.returns)):
        return
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    if not body or isinstance(body[0], ast.Pass | ast.Return | ast.Raise):
        return
    if not any(isinstance(n, ast.Yield | ast.YieldFrom) for n in ast.walk(node)):
        start = source.start(body[0])
        indent = source.content[source.content.rfind(b"\n", 0, start) + 1 : start]
        yield "early return", body[0], (Edit(start, start, b"return None\n" + indent),)


_FINDERS: tuple[Callable[[_Source, ast.AST], Found], ...] = (
    _dropped_calls,
    _off_by_one,
    _turned,
    _negated,
    _swapped_operators,
    _dropped_blocks,
    _swapped_names,
    _swapped_arguments,
    _early_return,
)


def _left_alone(tree: ast.AST) -> set[ast.AST]:
    """Returns all nodes of annotations, decorators, f-strings (without positions) and messages."""
    roots: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            roots += node.decorator_list
        if isinstance(node, ast.FunctionDef) and node.returns is not None:
            roots.append(node.returns)
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            roots.append(node.annotation)
        if isinstance(node, ast.JoinedStr | ast.Raise):
            roots.append(node)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            roots.append(node)
    return {node for root in roots for node in ast.walk(root)}


def find(package: str, file: str, content: bytes) -> list[Mutant]:
    """Returns every mutant of a file, in the order of their places."""
    source = _Source(content)
    alone = _left_alone(source.tree)
    mutants = []
    for node in ast.walk(source.tree):
        if node in alone:
            continue
        for finder in _FINDERS:
            for kind, where, edits in finder(source, node):
                mutants.append(_mutant(source, package, file, kind, where, edits))
    return sorted(mutants, key=lambda m: (m.line, m.column, m.kind, m.now))


def _mutant(
    source: _Source, package: str, file: str, kind: str, where: ast.AST, edits: tuple[Edit, ...]
) -> Mutant:
    start = min(edit.start for edit in edits)
    end = max(edit.end for edit in edits)
    # What is shown is the line, or the lines, of the change.
    begin = source.content.rfind(b"\n", 0, start) + 1
    until = source.content.find(b"\n", end)
    until = len(source.content) if until < 0 else until
    moved = tuple(Edit(e.start - begin, e.end - begin, e.text) for e in edits)
    was = source.content[begin:until]
    line = source.content.count(b"\n", 0, start) + 1
    texts = [" ".join(text.decode().split()) for text in (was, _edited(was, moved))]
    place = source.place(where)
    first = line if place is None else source.content.count(b"\n", 0, place) + 1
    lines = range(first, line + 1)
    return Mutant(package, file, line, start - begin, kind, texts[0], texts[1], edits, place, lines)


def apply(content: bytes, mutant: Mutant) -> bytes:
    """Returns the file with the change in it, and the mark before the statement of the change."""
    edits = mutant.edits
    if mutant.place is not None:
        begin = content.rfind(b"\n", 0, mutant.place) + 1
        indent = content[begin : mutant.place]
        edits = (Edit(mutant.place, mutant.place, _MARK + b"\n" + indent), *edits)
    return _edited(content, edits)


def _edited(content: bytes, edits: tuple[Edit, ...]) -> bytes:
    """Applies edits, of which several may begin at one place: there the first one comes first."""
    indexed = sorted(enumerate(edits), key=lambda p: (p[1].start, p[1].end, p[0]), reverse=True)
    for _, edit in indexed:
        content = content[: edit.start] + edit.text + content[edit.end :]
    return content


def sample(mutants: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """Returns ``count`` of them: file after file in turn, the kinds within a file in turn too."""
    chance = random.Random(seed)
    queues: dict[str, list[list[Mutant]]] = {}
    for file in sorted({m.file for m in mutants}):
        of_file: dict[str, list[Mutant]] = {}
        for mutant in mutants:
            if mutant.file == file:
                of_file.setdefault(mutant.kind, []).append(mutant)
        kinds = [of_file[kind] for kind in sorted(of_file)]
        for of_kind in kinds:
            chance.shuffle(of_kind)
        chance.shuffle(kinds)
        package = kinds[0][0].package
        queues.setdefault(package, []).append(in_turn(kinds))
    for files in queues.values():
        chance.shuffle(files)
    order = in_turn([queues[package] for package in sorted(queues)])
    return in_turn(order)[:count]


def in_turn(queues: list[list[T]]) -> list[T]:
    """Returns the first of each, then the second of each, and so on."""
    longest = max(map(len, queues), default=0)
    return [queue[i] for i in range(longest) for queue in queues if i < len(queue)]


def of_tree(source: Path, packages: tuple[str, ...]) -> list[Mutant]:
    """Returns every mutant of ``packages`` under ``source``, the folder of the library."""
    found = []
    for package in packages:
        for path in sorted((source / package).rglob("*.py")):
            file = path.relative_to(source).as_posix()
            found += find(package, file, path.read_bytes())
    return found
