"""Each invariant that a docstring states names the test that tries to break it, which fails on a
change that does: ``tools/broken_invariants.py`` makes the changes.
"""

from __future__ import annotations

import ast
import re

import pytest
from invariant_breaks import BREAKS, Break
from source_rules import PROJECT, ROOT, parse_sources

_STATED = re.compile(r"\bInvariant,\s+which\s+``(tests/[\w/]+\.py)``\s+tries\s+to\s+break:")


def _docstrings() -> dict[str, list[str]]:
    """Returns the docstrings that state an invariant, by their module."""
    found: dict[str, list[str]] = {}
    for file, tree in parse_sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                if re.search(r"\bInvariants?\b", text):
                    found.setdefault(file, []).append(text)
    return found


def test_every_stated_invariant_names_a_test_and_has_a_change_that_breaks_it() -> None:
    stated = _docstrings()
    assert set(stated) == {each.module for each in BREAKS}
    named = {file: set(_STATED.findall("\n".join(texts))) for file, texts in stated.items()}
    tested = {each.module: {each.test.split()[0]} for each in BREAKS}
    assert [file for file, tests in named.items() if not tested[file] <= tests] == []
    for file, texts in stated.items():
        for text in texts:
            assert text.count("Invariant") == len(_STATED.findall(text)), file


@pytest.mark.parametrize("broken", BREAKS, ids=lambda each: each.module)
def test_a_change_can_be_made_and_its_test_is_there(broken: Break) -> None:
    source = (ROOT / broken.changed).read_text(encoding="utf-8")
    assert source.count(broken.was) == 1
    ast.parse(source.replace(broken.was, broken.now))
    file, *options = broken.test.split()
    text = (PROJECT / file).read_text(encoding="utf-8")
    if options:
        assert re.search(rf"^def test_\w*{options[1]}", text, re.MULTILINE)
