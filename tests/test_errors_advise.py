"""An error that a user can act on says what to do, or which values are taken."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from literals import literal_text
from source_rules import parse_sources

# These report what is damaged or what a test found, which no other call would change.
# `_naming.damage_named` adds to damage which save is whole.
_REPORTS = {"CorruptSaveError", "ResumeError", "QueuedWorkError"}
_VERBS = (
    "add|ask|assign|begin|build|call|check|choose|clear|clone|close|compare|copy|create|delete|"
    "detach|do|drop|enable|end|free|gather|give|hand|hide|import|install|keep|leave|let|"
    "lift|list|load|lower|make|mark|move|name|offload|onload|open|park|pass|put|raise|read|"
    "redistribute|register|release|remove|rename|restart|restore|round|run|save|set|shard|"
    "split|start|stop|swap|take|try|turn|unpark|unset|use|wait|wrap|write"
)
_BEGINS = re.compile(rf"(?:^|[.;:] |, |, and |\bor |\bthen )(?:{_VERBS})\b", re.I)
_VALUES = re.compile(r"\b(expected|takes|is supported|are supported|it has: |allows)\b", re.I)
_LEAST = 0.77
_LEAST_WITH_REMEDY = 0.6  # by a verb, not by naming the values alone


def _text(node: ast.AST) -> str:
    """Returns a message with ``{}`` for what is put into it."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    text = literal_text(node, "{}")
    return "{}" if text is None else text


def _messages() -> Iterator[tuple[str, str]]:
    """Yields where each error of the library is raised that has a text of its own, and the text."""
    names = {
        node.name
        for node in ast.walk(parse_sources()["_errors.py"])
        if isinstance(node, ast.ClassDef)
    }
    for file, tree in parse_sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                kind, text = ast.unparse(node.exc.func), _text(node.exc.args[0])
                is_own = kind in names - _REPORTS and re.search("[a-z]{3}", text)
                if is_own:
                    yield f"{file}:{node.lineno}", text


def test_errors_say_what_to_do() -> None:
    found = list(_messages())
    silent = [
        f"{where}: {text}"
        for where, text in found
        if not _BEGINS.search(text) and not _VALUES.search(text)
    ]
    share = 1 - len(silent) / len(found)
    print(f"{share:.0%} of {len(found)}")
    assert share >= _LEAST, "\n".join(silent)


def test_most_errors_name_a_remedy_with_a_verb() -> None:
    found = list(_messages())
    silent = [f"{where}: {text}" for where, text in found if not _BEGINS.search(text)]
    share = 1 - len(silent) / len(found)
    assert share >= _LEAST_WITH_REMEDY, "\n".join(silent)
