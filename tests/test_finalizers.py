"""An object that an interrupt left half made dies as quietly as a whole one."""

from __future__ import annotations

import ast
import gc
import importlib
from typing import Any

import pytest
import torch
from interruptions import count_lines, interrupted_at
from source_rules import module_name, sources

from residency._checkpoint._capture._capture import Capture
from residency._transfer import SlabArena
from residency._transfer._owner import Lent


def finalizers() -> list[tuple[str, str]]:
    """Returns the module and the name of every class of the package that has a ``__del__``."""
    found = []
    for file, path in sources(".py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "def __del__" in text else ():
            if isinstance(node, ast.ClassDef) and any(
                isinstance(each, ast.FunctionDef) and each.name == "__del__" for each in node.body
            ):
                found.append((module_name(file), node.name))
    return found


@pytest.mark.parametrize(("module", "name"), finalizers(), ids=lambda value: str(value))
def test_an_object_without_any_field_is_finalized_without_an_error(module: str, name: str) -> None:
    kind: Any = getattr(importlib.import_module(module), name)  # at the top of its module
    empty = object.__new__(kind)
    empty.__del__()
    del empty  # once more; an error here would fail the test, too
    gc.collect()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Capture(SlabArena(pin=False)),
        lambda: Lent(torch.zeros(3), torch.zeros(3), None),
    ],
    ids=["Capture", "Lent"],
)
def test_an_interrupt_in_the_making_raises_no_other_error(make: Any) -> None:
    assert finalizers()
    for line in range(1, count_lines(make) + 1):
        assert interrupted_at(line, make, KeyboardInterrupt), line
        gc.collect()
