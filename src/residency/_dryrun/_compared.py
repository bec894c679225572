"""The comparisons of the source in which a number is used that a dry run does not compute.

``if token.item() == END: break`` asks for a number, and Python compares it: the simulator hears of
no truth value. The place of the read leads to the comparison, and the other side of that, as far as
it is made of names and numbers, to a number by which the comparison is true, or is not.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

from residency._dryrun._sources import Parsed, Span, place_in

_COMPARE: dict[type, Callable[[float, float], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_ARITHMETIC: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_AS_IT_IS = ("float", "int", "round")
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class Compared(NamedTuple):
    """A comparison, and the side of it that is the number."""

    test: ast.Compare
    is_left: bool

    def number(
        self, frame: FrameType, answer: bool, usual: float, *, is_whole: bool
    ) -> float | None:
        """Returns a number by which the comparison has an answer; None where its other side is not
        known.

        Args:
            frame: Where it is compared; names have their values there.
            answer: The answer.
            usual: The number that stands for it otherwise, and does where it gives that answer.
            is_whole: Whether it is a whole number.
        """
        try:
            other = _value(self.test.comparators[0] if self.is_left else self.test.left, frame)
        except (ArithmeticError, LookupError, TypeError):
            return None
        compare = _COMPARE[type(self.test.ops[0])]
        near = [usual, 0, 2, other, other + 1, other - 1, other / 2, 2 * other]
        for each in map(int, near) if is_whole else near:
            if compare(*((each, other) if self.is_left else (other, each))) == answer:
                return each
        return None


def compared_at(source: Parsed, span: Span) -> Compared | None:
    """Returns the comparison by which a branch or a loop goes of what was read at a place, there or
    by the name that it has in its function; None where there is none.
    """
    tests = list(_comparisons(source.tree))
    found = next(_sides(tests, lambda side: _is_value(side, span)), None)
    if found is not None:
        return found
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assign) and _is_value(node.value, span):
            break
    else:
        return None
    name = node.targets[0]
    if not isinstance(name, ast.Name) or len(node.targets) > 1:
        return None
    around = list(_comparisons(_function_around(source, node)))
    return next(_sides(around, lambda side: getattr(side, "id", None) == name.id), None)


def _comparisons(tree: ast.AST) -> Iterator[ast.Compare]:
    """Yields the comparisons of two things by which branches, loops and checks go."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.While | ast.Assert):
            tests = (each for each in ast.walk(node.test) if isinstance(each, ast.Compare))
            yield from (t for t in tests if len(t.ops) == 1 and type(t.ops[0]) in _COMPARE)


def _sides(tests: list[ast.Compare], is_it: Callable[[Any], bool]) -> Iterator[Compared]:
    for test in tests:
        if is_it(test.left) or is_it(test.comparators[0]):
            yield Compared(test, is_it(test.left))


def _is_value(piece: ast.expr, span: Span) -> bool:
    """Returns whether a piece of code is what was read at a place, and no more."""
    if place_in(piece) == span:
        return True
    if not isinstance(piece, ast.Call) or getattr(piece.func, "id", "") not in _AS_IT_IS:
        return False
    return len(piece.args) == 1 and _is_value(piece.args[0], span)


def _function_around(source: Parsed, node: ast.AST) -> ast.AST:
    outer = source.outer(node)
    while outer is not None and not isinstance(outer, _Function):
        node, outer = outer, source.outer(outer)
    return outer or node


def _value(piece: ast.expr, frame: FrameType) -> float:
    """Returns the number that a piece of code stands for, without calling anything.

    Raises:
        LookupError: A name has no value.
        TypeError: It is no number, or hangs on a call.
        ArithmeticError: It has no value.
    """
    found: Any = piece
    if isinstance(piece, ast.BinOp) and type(piece.op) in _ARITHMETIC:
        return _ARITHMETIC[type(piece.op)](_value(piece.left, frame), _value(piece.right, frame))
    if isinstance(piece, ast.UnaryOp) and isinstance(piece.op, ast.USub):
        return -_value(piece.operand, frame)
    if isinstance(piece, ast.Constant):
        found = piece.value
    elif isinstance(piece, ast.Name | ast.Attribute):
        found = _named(piece, frame)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise TypeError(piece)
    return found


def _named(piece: ast.expr, frame: FrameType) -> Any:
    if isinstance(piece, ast.Name):
        names = frame.f_locals if piece.id in frame.f_locals else frame.f_globals
        return names[piece.id]
    if isinstance(piece, ast.Attribute):
        return vars(_named(piece.value, frame))[piece.attr]
    raise TypeError(piece)
