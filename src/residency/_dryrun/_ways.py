"""The way that a program goes by truth values and numbers that a dry run does not compute.

The code that asks for one says which way a training goes in which nothing goes wrong: a check
holds, a loop that something else bounds goes on to that bound (the most that it can take), and a
loop that nothing else bounds makes one round. The place of an instruction leads to that code in
the source. The answer names the branches and loops, of the script and of libraries but torch, that
hung on such values: another way may take more.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import dis
import sys
from collections.abc import Iterator
from types import CodeType, FrameType

from residency._dryrun._compared import Compared, compared_at
from residency._dryrun._places import is_ours, is_script, line_of, outwards
from residency._dryrun._sources import TORCH, Parsed, Span, has, place_in, span_of
from residency_sim import dry_run

# Calls in a branch by which it takes no memory: they say something, and go on.
_SAYS = ("add_scalar", "debug", "error", "info", "log", "print", "warn", "write")
_LOOP = (
    "a value that a dry run does not compute says how often this loop runs: another number of "
    "rounds may take more"
)
_BRANCH = (
    "a value that a dry run does not compute says which way this branch goes: the other way may "
    "take more"
)
_ASIDE = ("CACHE", "COPY", "EXTENDED_ARG", "NOP")
_MOST_ROUNDS = 5000  # of a loop that something else is taken to bound
_PROGRESS = 2**-20  # by which a fraction is less each time, as the simulator has it
_Loop = ast.For | ast.AsyncFor | ast.While
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclasses.dataclass
class _Asked:
    """A test, and what is answered to it: another thing at each last of so many rounds; 0, always
    the same, as to a check.
    """

    answer: bool
    rounds: int = 0
    times: int = 0

    @property
    def is_check(self) -> bool:
        """Whether it is a check, which always holds."""
        return not self.rounds

    def next_answer(self) -> bool:
        """Returns the answer to who asks now, once more."""
        self.times += 1
        return self.answer != (self.rounds > 0 and self.times % self.rounds == 0)


class Ways:
    """The answers to code that asks for truth values, and the branches that go by them."""

    def __init__(self) -> None:
        """Begins with no answers."""
        self._sources: dict[str, Parsed | None] = {}
        # By instruction, of code that is kept: code of two files may be equal.
        self._asked: dict[tuple[int, int], tuple[CodeType, _Asked | None]] = {}
        self._compared: dict[tuple[int, int], tuple[CodeType, Compared | None]] = {}
        self._tests: dict[tuple[int, Span], _Asked | None] = {}
        self._spans: dict[str, set[Span]] = collections.defaultdict(set)

    def start(self) -> None:
        """Answers the simulator from now on."""
        dry_run.attach_decider(self._decide)

    def _decide(self, what: str, number: float) -> float | None:
        """Returns the answer to the code that asks; None where nothing is known of it.

        Args:
            what: What stands for the value: a "comparison" or "all" that is true, a whole "number"
                or a "fraction" that may be asked for its truth, or compared; "", nothing.
            number: The number that stands for it.
        """
        # A function that a dry run goes around is entered from ours; autograd's threads have none.
        frames = (f for f in outwards(sys._getframe().f_back) if not _is_of_ours(f.f_code))
        frame = next(frames, None)
        if frame is None or frame.f_code.co_filename.startswith(TORCH):
            return None
        code, instruction = frame.f_code, frame.f_lasti
        is_number = what in ("number", "fraction")
        if is_number and not _asks_for_truth(code, instruction):
            return self._number(frame, number, is_whole=what == "number")
        if (id(code), instruction) not in self._asked:
            self._asked[id(code), instruction] = code, self._asked_at(code, instruction)
        asked = self._asked[id(code), instruction][1]
        if asked is None or (what == "comparison" and not asked.is_check):
            return None
        return asked.next_answer() * (number if is_number else 1)

    def _number(self, frame: FrameType, number: float, *, is_whole: bool) -> float | None:
        """Returns a number that a comparison in which it is used answers so; None where it is used
        in none, or where nothing is known of that.
        """
        code, instruction = frame.f_code, frame.f_lasti
        place = id(code), instruction
        if place not in self._compared:
            self._compared[place] = code, self._compared_at(code, span_of(code, instruction))
        compared = self._compared[place][1]
        span = place_in(compared.test) if compared is not None else None
        asked = self._tests.get((id(code), span)) if span is not None else None
        if compared is None or span is None or asked is None:
            return None
        self._spans[code.co_filename].add(span)
        usual = number if is_whole else number * (1 - asked.times % 500 * _PROGRESS)
        return compared.number(frame, asked.next_answer(), usual, is_whole=is_whole)

    def _compared_at(self, code: CodeType, span: Span | None) -> Compared | None:
        source = self._source(code.co_filename)
        found = compared_at(source, span) if source is not None and span is not None else None
        if source is not None and found is not None:
            span = place_in(found.test)
            self._tests.setdefault((id(code), span), _asked_by(source, span))
        return found

    def _asked_at(self, code: CodeType, instruction: int) -> _Asked | None:
        file, span = code.co_filename, _span_of_asked(code, instruction)
        source = self._source(file)
        if span is None or source is None:
            return None
        self._spans[file].add(span)
        # A loop asks before its first round and after each one, by two instructions.
        return self._tests.setdefault((id(code), span), _asked_by(source, span))

    def _source(self, file: str) -> Parsed | None:
        if file not in self._sources:
            self._sources[file] = Parsed.of(file)
        return self._sources[file]

    def branches(self, places: dict[str, set[Span]]) -> Iterator[dict[str, str]]:
        """Yields the branches and loops that hung on what was not computed, the script's first.

        Args:
            places: For each file where values were read that were not computed. Of a library only
                tests count that asked themselves: a call of it that reads a value may be ours.
        """
        for file in sorted({**places, **self._spans}, key=lambda file: not is_script(file)):
            source = None if is_ours(file) or file.startswith(TORCH) else self._source(file)
            if source is None:
                continue
            spans = self._spans.get(file, set())
            spans = spans | places.get(file, set()) if is_script(file) else spans
            for node in ast.walk(source.tree):
                if not isinstance(node, ast.If | ast.While) or only_says(node):
                    continue
                if _hangs_on(source, node.test, spans):
                    is_loop = isinstance(node, ast.While) or _ends_loop(source, node)
                    place = line_of(file, node.lineno)
                    yield {"line": place, "what": _LOOP if is_loop else _BRANCH}


def _is_of_ours(code: CodeType) -> bool:
    return is_ours(code.co_filename)


def _span_of_asked(code: CodeType, instruction: int) -> Span | None:
    """Returns where the expression stands that is asked for its truth.

    A jump asks for what the instruction before it has left, and has no place of its own.
    """
    at = instruction
    name = dis.opname[code.co_code[at]]
    while at and (name in _ASIDE or _asks_for_truth(code, at)):
        at -= 2
        name = dis.opname[code.co_code[at]]
    return span_of(code, at)


def _asks_for_truth(code: CodeType, instruction: int) -> bool:
    name = dis.opname[code.co_code[instruction]]
    return name in ("TO_BOOL", "UNARY_NOT") or ("JUMP" in name and "_IF_" in name)


# ------------------------------------------------------------------------------------------- checks


def _asked_by(source: Parsed, span: Span) -> _Asked | None:
    """Returns the test that asks at a place; None where nothing is known of what it is for."""
    tests = [
        node
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Assert | ast.If | ast.While) and has(node.test, span)
    ]
    found = _polarity(tests[-1].test, span) if tests else None  # the innermost
    if found is None:
        return None
    node, (if_true, decides, is_bounded) = tests[-1], found
    if isinstance(node, ast.Assert):
        return _Asked(if_true)
    if isinstance(node, ast.While):  # entered, and left again, where nothing bounds it
        return _Asked(if_true, _MOST_ROUNDS if is_bounded else 2)
    if not decides:
        return None
    if _raises(node.body) or _raises(node.orelse):
        return _Asked(not if_true if _raises(node.body) else if_true)
    loop = _ends_loop(source, node)
    if loop is None:
        return None
    # What bounds it is the iterator, or its own test.
    is_endless = isinstance(loop, ast.While) and isinstance(loop.test, ast.Constant)
    return _Asked(if_true if is_endless else not if_true, _MOST_ROUNDS)


def _polarity(test: ast.expr, span: Span) -> tuple[bool, bool, bool] | None:
    """Returns what the value at a place has to be for a test to hold, whether the test can fail by
    it alone, and whether something else ends a loop; None where it is a part of something else.
    """
    if place_in(test) == span:
        return True, True, False
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        found = _polarity(test.operand, span)
        return None if found is None else (not found[0], *found[1:])
    if isinstance(test, ast.NamedExpr):
        return _polarity(test.value, span)
    if isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id == "bool":
        return _polarity(test.args[0], span) if len(test.args) == 1 else None
    if not isinstance(test, ast.BoolOp):
        return None
    others = [value for value in test.values if not has(value, span)]
    found = next((_polarity(v, span) for v in test.values if has(v, span)), None)
    if found is None:
        return None
    is_bounded = isinstance(test.op, ast.And) and any(map(_is_bound, others))
    return found[0], found[1] and isinstance(test.op, ast.And), found[2] or is_bounded


def _is_bound(test: ast.expr) -> bool:
    """Returns whether a test compares plain numbers, as one of rounds does."""
    if not isinstance(test, ast.Compare):
        return False
    calls = [node for node in ast.walk(test) if isinstance(node, ast.Call)]
    return all(isinstance(call.func, ast.Name) and call.func.id == "len" for call in calls)


def _raises(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], ast.Raise)


def _ends_loop(source: Parsed, node: ast.stmt) -> _Loop | None:
    """Returns the loop that a branch ends, by a `break` or a `return`; None where it ends none."""
    if not isinstance(node, ast.If) or not isinstance(node.body[-1], ast.Break | ast.Return):
        return None
    outer = source.outer(node)
    while outer is not None and not isinstance(outer, _Function):
        if isinstance(outer, _Loop):
            return outer
        outer = source.outer(outer)
    return None


# ----------------------------------------------------------------------------------------- branches


def _hangs_on(source: Parsed, test: ast.expr, spans: set[Span]) -> bool:
    """Returns whether a test hangs on what was read at one of some places."""
    pieces = [test] if not isinstance(test, ast.BoolOp) else test.values
    pieces = [piece for piece in pieces if not _asks_what_is_there(piece)]
    return any(has(piece, span) for piece in source.behind(pieces) for span in spans)


def _asks_what_is_there(test: ast.expr) -> bool:
    """Returns whether a test asks for an object, its type or its length, and not for a value."""
    if isinstance(test, ast.UnaryOp):
        return _asks_what_is_there(test.operand)
    if isinstance(test, ast.Compare):
        if any(isinstance(op, ast.Is | ast.IsNot) for op in test.ops):
            return True
        return any(map(_asks_what_is_there, [test.left, *test.comparators]))
    asks = ("callable", "hasattr", "isinstance", "len")
    return isinstance(test, ast.Call) and getattr(test.func, "id", "") in asks


def only_says(node: ast.If | ast.While) -> bool:
    """Returns whether neither way of a branch does more than to say something, or to raise."""
    if isinstance(node, ast.While):
        return False
    return all(map(_says, (*node.body, *node.orelse)))


def _says(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        called = statement.value.func
        name = getattr(called, "attr", "") or getattr(called, "id", "")
        return any(word in name.lower() for word in _SAYS)
    if isinstance(statement, ast.Assign | ast.AugAssign):
        return not any(isinstance(node, ast.Call) for node in ast.walk(statement.value))
    return isinstance(statement, ast.Pass | ast.Raise)
