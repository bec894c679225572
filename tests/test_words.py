"""A sentence says which thing or person acts, in comments, docstrings, messages and docs."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from source_rules import PROJECT, sources

# Name the thread, the caller or the rank instead; a failure is reported, a state is fresh.
DIALECT = re.compile(
    r"\b(nobody|whoever|anybody|everybody|somebody|told|by means|births?|unborn)\b",
    re.IGNORECASE,
)

# From Python 3.12 on an f-string is several tokens.
_SAID = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def said_in(source: str) -> Iterator[tuple[int, str]]:
    """Yields the lines of a Python source that are comments or strings, with their numbers."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in _SAID:
            yield from enumerate(token.string.splitlines(), token.start[0])


def _sources() -> Iterator[tuple[Path, Iterator[tuple[int, str]]]]:
    for _, path in sources(".py"):
        yield path, said_in(path.read_text(encoding="utf-8"))
    for _, path in sources(".cpp", ".h"):
        yield path, enumerate(path.read_text(encoding="utf-8").splitlines(), 1)


def _pages() -> Iterator[tuple[Path, Iterator[tuple[int, str]]]]:
    for path in sorted([*PROJECT.glob("*.md"), *PROJECT.glob("docs/**/*.md")]):
        yield path, enumerate(path.read_text(encoding="utf-8").splitlines(), 1)


@pytest.mark.parametrize("texts", [_sources, _pages])
def test_a_sentence_has_a_thing_or_a_person_as_its_subject(texts):
    found = [
        f"{path.relative_to(PROJECT)}:{number}: {line.strip()}"
        for path, lines in texts()
        for number, line in lines
        if DIALECT.search(line)
    ]
    assert found == []


def test_comments_docstrings_and_messages_are_looked_through_and_names_are_not():
    source = '"""Told."""\ntold = 1  # nobody\nprint(f"{told} by means of")\n'
    found = [(number, line) for number, line in said_in(source) if DIALECT.search(line)]
    assert [number for number, _ in found] == [1, 2, 3]
    assert not DIALECT.search('f"{told_on}"')
