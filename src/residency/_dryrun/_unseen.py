"""The branches that no round entered of a loop that was ended before its time.

What they take is in no figure of the rounds before: an evaluation each 500 steps, a penalty each
sixteenth, and most of all layers that are trained from an epoch on.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

from residency._dryrun._places import line_of
from residency._dryrun._sources import Parsed
from residency._dryrun._turning import turning
from residency._dryrun._ways import only_says

_MOST_SHOWN = 8
_Line = tuple[str, int]


def branches_left_out(cut: Collection[_Line], entered: Collection[_Line]) -> dict[str, list[str]]:
    """Returns the lines of branches that were not entered, which go by the rounds of their loop.

    Args:
        cut: Where the loops stand that were ended: a file, and a line of it.
        entered: The branches of all loops that were entered.

    Returns:
        Of ``branches`` the first few, and of ``thaws`` the lines that make parameters trained, or
        give an optimizer more of them.
    """
    branches: dict[str, None] = {}
    thaws: dict[str, None] = {}
    for file, line in cut:
        source = Parsed.of(file)
        for loop in ast.walk(source.tree) if source is not None else ():
            if not isinstance(loop, ast.For | ast.AsyncFor | ast.While) or loop.lineno != line:
                continue
            for branch in turning(loop):
                found = {line_of(file, each.lineno): None for each in _thaws(branch)}
                if (file, branch.lineno) not in entered and (found or not only_says(branch)):
                    branches[line_of(file, branch.lineno)] = None
                    thaws |= found
    return {"branches": list(branches)[:_MOST_SHOWN], "thaws": list(thaws)}


def _thaws(branch: ast.If) -> Iterator[ast.expr | ast.stmt]:
    for each in (node for statement in branch.body for node in ast.walk(statement)):
        if isinstance(each, ast.expr | ast.stmt) and _is_thaw(each):
            yield each


def _is_thaw(node: ast.AST) -> bool:
    if isinstance(node, ast.Assign):
        targets = [each for each in node.targets if isinstance(each, ast.Attribute)]
        is_flag = any(each.attr == "requires_grad" for each in targets)
        return is_flag and isinstance(node.value, ast.Constant) and node.value.value is True
    if not isinstance(node, ast.Call):
        return False
    name = getattr(node.func, "attr", "") or getattr(node.func, "id", "")
    if name == "requires_grad_":
        return all(isinstance(each, ast.Constant) and each.value for each in node.args)
    return name == "add_param_group" or name.lower().startswith(("unfreeze", "thaw"))
