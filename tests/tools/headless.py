"""Finds phrases, in the texts that users read, that have to be read twice.

Three kinds: a "what" that stands for a noun ("what is lent") and opens no question ("says what it
costs"); "that of", "those of", "of which" or "of whom" for a noun; and "where" for "if" or "when".
The words around it decide: the first lists below are lists of what is plain English. Besides, some
turns in which "one", "who" or "of" stands for a noun that the reader has to look for.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from literals import literal_text
from source_rules import PROJECT, declared_names, doors, parse_library

# After these words "what" and "where" open a question.
_ASKING = (
    "asks? asked asking checks? checked decides? decided determines describes? explains? explained"
    " finds? finding foresees? guess knows? knew known learns? matter measures? names? notices?"
    " predicts? prints? promises? records? remembers? reports? reported says? said saying sees?"
    " seen seeing shows? showed shown states? stated tells? understands?"
).replace(" ", "|")
_BETWEEN = r"you|it|us|exactly|just|and|or|when|how|who|why"
_QUESTION = rf"\b(?:{_ASKING})(?:,? (?:{_BETWEEN}))*,? "
_PLACES = (
    "address addresses column directory file folder home host lines? machine memory page path phase"
    " places? points? positions? rooms? side spot step from to of"
).replace(" ", "|")
_IS_ASKED = re.compile(r"[^.!]*\?")


class _Phrase(NamedTuple):
    """A word, and what has to stand before or after it where it is plain English."""

    word: re.Pattern[str]
    before: re.Pattern[str] | None = None
    after: re.Pattern[str] | None = None


_PHRASES = (
    _Phrase(
        re.compile(r"\bwhat\b", re.I),
        re.compile(rf"(?:{_QUESTION}|\bwhich does )$", re.I),
        re.compile(r"what (?:else )?(?:to|if)\b", re.I),
    ),
    _Phrase(
        re.compile(r"\bwhere\b", re.I), re.compile(rf"(?:{_QUESTION}|\b(?:{_PLACES}) )$", re.I)
    ),
    _Phrase(re.compile(r"\b(?:that|those) of\b|\bof (?:which|whom)\b", re.I)),
    _Phrase(re.compile(r"(?:^|[.;:] )(?:An? \w+ one|One) that\b|\b(?:or in|with) one that\b")),
    _Phrase(re.compile(r", as of (?!now)|, of \w+, too\b|\bthat an? \w+ is of\b|\bis none of\b")),
    _Phrase(re.compile(r"\bso who\b|\bhas no \w+ of it\b|, or as it was\b|\bhas run it\b")),
)


class Text(NamedTuple):
    """A text that users read.

    Attributes:
        place: The file and its line.
        text: The text, without code and addresses.
        is_label: Whether it is a heading, which may be a question without its mark.
    """

    place: str
    text: str
    is_label: bool = False


def faults_of(text: str) -> list[str]:
    """Returns the phrases of a text that a reader has to read twice."""
    found = []
    for phrase in _PHRASES:
        for match in phrase.word.finditer(text):
            rest = text[match.start() :]
            if phrase.before is not None and phrase.before.search(text[: match.start()]):
                continue
            if (phrase.after and phrase.after.match(rest)) or _IS_ASKED.match(rest):
                continue
            found.append(text[max(0, match.start() - 40) : match.end() + 40])
    return found


def faults(texts: Iterator[Text]) -> list[str]:
    """Returns where each such phrase is, and the words around it."""
    return [
        f"{each.place}: {found}"
        for each in texts
        if not each.is_label
        for found in faults_of(each.text)
    ]


def pages() -> Iterator[Text]:
    """Yields the headings, paragraphs, list items and cells of the README and the docs."""
    for path in sorted([*PROJECT.glob("*.md"), *PROJECT.glob("docs/**/*.md")]):
        place = path.relative_to(PROJECT).as_posix()
        for text in texts_of_page(path.read_text(encoding="utf-8")):
            yield text._replace(place=f"{place}:{text.place}")


def texts_of_page(source: str) -> Iterator[Text]:
    """Yields the texts of a page of Markdown; their places are lines."""
    lines = re.sub(r"^(```|:::).*?^\1:*$", _blank, source, flags=re.M | re.S).splitlines()
    begin, paragraph = 1, ""
    for number, line in enumerate([*lines, ""], 1):
        is_cells, is_heading = line.startswith("|"), line.startswith("#")
        if not line.strip() or is_cells or is_heading or re.match(r" *(?:[-*:]|\d+\.) ", line):
            yield Text(str(begin), _plain(paragraph))
            begin, paragraph = number, ""
        if is_heading:
            yield Text(str(number), _plain(line.lstrip("# ")), is_label=True)
        elif is_cells:
            is_label = number < len(lines) and lines[number].startswith("|--")
            for cell in _plain(line).split("|"):
                yield Text(str(number), cell.strip(), is_label)
        else:
            paragraph += f" {line.strip()}"


def _blank(found: re.Match[str]) -> str:
    return "\n" * found[0].count("\n")


def _plain(markdown: str) -> str:
    """Returns a text without code, addresses of links and marks of emphasis."""
    text = re.sub(r"`[^`]*`", "X", markdown)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return re.sub(r"[\[\]*_]", "", text).strip()


def messages() -> Iterator[Text]:
    """Yields each string of the package with four words or more that is no docstring."""
    for file, tree in parse_library().items():
        inner = {
            part
            for node in ast.walk(tree)
            for part in (node.values if isinstance(node, ast.JoinedStr) else ())
        }
        said = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if node in inner or node in said or not isinstance(node, ast.expr):
                continue
            text = literal_text(node, "X") or ""
            if len(text.split()) >= 4:
                yield Text(f"{file}:{node.lineno}", text)


_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def public_docstrings() -> Iterator[Text]:
    """Yields the docstrings of the doors, of the names that they offer, and of these' members."""
    files = parse_library()
    seen: set[ast.AST] = set()
    for door in doors(files):
        folder = door.rpartition("/")[0]
        near = [file for file in files if file == door or (folder and file.startswith(folder))]
        yield from _docstring(door, files[door])
        for name in declared_names(files[door]) or ():
            for file in (*near, *files):
                found = _defined(files[file], name)
                if found is not None:
                    if found not in seen:
                        seen.add(found)
                        yield from _docstring(file, found)
                        yield from _members(file, found)
                    break


def _members(file: str, node: _Documented) -> Iterator[Text]:
    for each in node.body if isinstance(node, ast.ClassDef) else ():
        is_public = isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_public and not each.name.startswith("_"):
            yield from _docstring(file, each)


def _defined(tree: ast.Module, name: str) -> _Documented | None:
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return next((e for e in tree.body if isinstance(e, kinds) and e.name == name), None)


def _docstring(file: str, node: _Documented) -> Iterator[Text]:
    text = ast.get_docstring(node) or ""
    line = getattr(node, "lineno", 1)
    for part in re.split(r"\n\s*\n|\n(?=\s+\w+: )", re.sub(r"``?[^`]*``?", "X", text)):
        yield Text(f"{file}:{line}", " ".join(part.split()))
