"""A class's docstring says what it is, a function's what it does, a property's what it has."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from source_rules import parse_sources

_NOUNS_BEGIN = {
    *("A", "An", "The", "One", "Two", "This", "Such", "Everything", "Something"),
}
_STATES = {"Is", "Are", "Has"}  # verbs, but of something that is
_VALUES = {"property", "cached_property", "fixture"}


def _documented() -> Iterator[tuple[str, ast.AST, str]]:
    """Yields where each docstring is, whose it is, and its first word."""
    for file, tree in parse_sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                words = (ast.get_docstring(node) or "").split()
                if words:
                    yield f"{file}:{node.lineno}", node, words[0].rstrip(",.;:")


def _is_value(node: ast.AST) -> bool:
    decorators = getattr(node, "decorator_list", [])
    return any(ast.unparse(each).partition("(")[0].split(".")[-1] in _VALUES for each in decorators)


def _is_noun(word: str) -> bool:
    return word in _NOUNS_BEGIN or word.startswith("``") or word.endswith("'s")


def test_a_class_is_something() -> None:
    others = [
        f"{where}: {word}"
        for where, node, word in _documented()
        if isinstance(node, ast.ClassDef) and not _is_noun(word)
    ]
    assert not others


def test_a_function_does_something() -> None:
    others = [
        f"{where}: {word}"
        for where, node, word in _documented()
        if not isinstance(node, ast.ClassDef) and not _is_value(node)
        if not word.endswith("s") or word in _STATES
    ]
    assert not others


def test_a_property_is_a_value() -> None:
    verbs = {"Returns", "Says", "Gives", *_STATES}
    others = [
        f"{where}: {word}"
        for where, node, word in _documented()
        if _is_value(node) and word in verbs
    ]
    assert not others
