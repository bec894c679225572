"""Each condition and each statement of the reducer matters to a row: a copy without it is seen.

The copies are those of ``tests/tools/mutants.py``, and one without each part of an ``and`` or an
``or``, each ``not`` and each statement. No test of this file needs torch.
"""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mutants
import pytest
from tests.dryrun.event_lists import ROWS, EventList, differences, read

from residency._dryrun import _steering

SOURCE = Path(_steering.__file__)
KINDS = {"comparison turned", "condition negated", "and/or swapped", "one off"}
# Nobody sees whether these are 0 or 1: at least one step is wanted, and each look says the others.
ALIKE = ("asked: int = 0", "to_fill: int = 0", "self.asked = 0", "loader: int = 0", "held: int = 0")


def broken() -> dict[str, bytes]:
    """Returns the source with each break, by a name that says where it is."""
    content = SOURCE.read_bytes()
    found = {
        f"{mutant.line}:{mutant.column} {mutant.kind}": mutants.apply(content, mutant)
        for mutant in mutants.find("_dryrun", "_dryrun/_steering.py", content)
        if mutant.kind in KINDS and not any(each in mutant.was for each in ALIKE)
    }
    found |= {f"{line} without {part}": text for line, part, text in _without(content.decode())}
    return found


def _without(text: str) -> Iterator[tuple[int, str, bytes]]:
    """Yields the source without each part of a condition, each ``not`` and each statement."""
    for number, node in enumerate(ast.walk(ast.parse(text))):
        for part in range(len(node.values) if isinstance(node, ast.BoolOp) else 1):
            tree = ast.parse(text)
            same: Any = [*ast.walk(tree)][number]
            if isinstance(node, ast.BoolOp):
                gone = same.values.pop(part)
            elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
                gone, same.op = node, ast.UAdd()  # which leaves a bool as it is
            elif isinstance(node, ast.FunctionDef):
                continue
            elif _is_statement(node):
                gone, same.__class__ = node, ast.Pass
            else:
                continue
            yield node.lineno, ast.unparse(gone).splitlines()[0], ast.unparse(tree).encode()


def _is_statement(node: ast.AST) -> bool:
    """Returns whether a node does something by itself, and is no docstring."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    return isinstance(node, ast.Assign | ast.AugAssign | ast.If | ast.For)


def loaded(content: bytes) -> types.ModuleType:
    module = types.ModuleType("a_copy_of_steering")
    sys.modules[module.__name__] = module  # where a dataclass looks for its annotations
    exec(compile(content, str(SOURCE), "exec"), vars(module))
    return module


def is_seen(content: bytes, lists: list[EventList]) -> bool:
    try:
        module = loaded(content)
        return any(next(differences(module, each), "") for each in lists)
    except Exception:  # the break's own: whatever it raises is seen
        return True


@pytest.fixture(scope="module")
def lists() -> list[EventList]:
    return [read(row) for row in ROWS.values()]


def test_the_reducer_itself_passes(lists: list[EventList]) -> None:
    assert not is_seen(SOURCE.read_bytes(), lists)


@pytest.mark.whole
def test_a_row_sees_each_break(lists: list[EventList]) -> None:
    breaks = broken()
    assert len(breaks) > 300
    assert [name for name, content in breaks.items() if not is_seen(content, lists)] == []
