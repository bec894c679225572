"""The branches of a loop that go by its rounds: what an epoch, a counter or a schedule turns on.

Loaded by its path in processes that may never import torch: nothing but the standard library.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator


def turning(loop: ast.AST) -> Iterator[ast.If]:
    """Yields the branches in a loop that call something, and whose test has a name that the loop
    gives a value.
    """
    changed = {
        node.id
        for node in ast.walk(loop)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    for node in ast.walk(loop):
        if isinstance(node, ast.If):
            names = {each.id for each in ast.walk(node.test) if isinstance(each, ast.Name)}
            does = any(isinstance(each, ast.Call) for body in node.body for each in ast.walk(body))
            sets = any(isinstance(each, ast.Assign) for each in node.body)
            if names & changed and (does or sets):
                yield node
