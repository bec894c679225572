"""Links the first use of each word of the vocabulary on a page of the site."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes

_VOCABULARY = "explanation/vocabulary"
# On most pages these have their ordinary meaning.
_ORDINARY = {
    "block", "capture", "context", "cut", "device", "document", "dry", "face", "free", "gate", "held", "host",
    "outside", "owner", "part", "place", "prime", "save", "schedule", "source", "span", "state", "torture", "unit", "whole",
}  # fmt: skip
_TAKES_NO_LINK = (nodes.literal, nodes.literal_block, nodes.reference, nodes.term, nodes.title)


def _anchor(word: str) -> str:
    return f"word-{nodes.make_id(word)}"


def _words(doctree: nodes.document) -> list[str]:
    """Returns the words of the vocabulary, and gives each an anchor there."""
    found = []
    for term in doctree.findall(nodes.term):
        words = [word.strip() for word in term.astext().split(",")]
        term["ids"] += [_anchor(word) for word in words]
        found += words
    return found


def _link(app: Any, doctree: nodes.document, page: str) -> None:
    words = set(app.env.vocabulary) - _ORDINARY
    to_vocabulary = app.builder.get_relative_uri(page, _VOCABULARY)
    for text in list(doctree.findall(nodes.Text)):
        parents, parent = [], text.parent
        while parent is not None:
            parents.append(parent)
            parent = parent.parent
        if page == _VOCABULARY or any(isinstance(each, _TAKES_NO_LINK) for each in parents):
            continue
        pieces: list[nodes.Node] = []
        rest = text.astext()
        while words and (found := _pattern(words).search(rest)):
            word = found[1].lower()
            words.discard(word)
            link = nodes.reference("", found[0], refuri=f"{to_vocabulary}#{_anchor(word)}")
            pieces += [nodes.Text(rest[: found.start()]), link]
            rest = rest[found.end() :]
        if pieces:
            text.parent.replace(text, [*pieces, nodes.Text(rest)])


def _pattern(words: set[str]) -> re.Pattern[str]:
    longest_first = sorted(words, key=lambda word: (-len(word), word))
    return re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, longest_first))})s?(?![\w-])", re.I)


def _read(app: Any, doctree: nodes.document) -> None:
    if app.env.docname == _VOCABULARY:
        app.env.vocabulary = _words(doctree)


def setup(app: Any) -> dict[str, bool]:
    """Registers this as an extension of Sphinx."""
    app.connect("doctree-read", _read)
    app.connect("doctree-resolved", _link)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
