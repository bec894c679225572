"""Texts that users read have no headless "what", no "those of" and no "where" for "if".

README, docs, messages, and the docstrings of public names. A place of `MESSAGES_LEFT` keeps what it
had when the rule came; its number may only fall.
"""

from __future__ import annotations

from collections import Counter

import headless
import pytest

# The motto of the README and of the site.
ALLOWED = {"when and where bytes live, never what is computed"}
MESSAGES_LEFT = {"_demo": 14, "_checkpoint": 2, "_optim": 2}

# Sentences that a review marked, and that were rewritten.
READ_TWICE = (
    "No GPU has run it yet.",
    "what is parked moves twice",
    "The round of a loop that is under way goes on to its end, and no later one comes, of epochs, "
    "too.",
    "Each optimizer must have made them, as of a GAN, or one of them ten times as many.",
    "Mends of what was never released are in the history of the repository.",
    "those of verl, in .venv-verl: it pins an older transformers",
    "One that said that it failed, and may try again, is waited for a tenth of that, at most 10 s.",
    "A rank that finds the failure of another, and no sign that it concerns its own attempt, "
    "cannot know whether the other one failed in this call or in one that this rank left out.",
    "the document says of 'x' what makes no sense",
    "the save of step 3 names x and has no bytes of it.",
    "Gives the home of the library's own that a view is of a tensor over the view's storage, so "
    "that a copy of both, or a file, has them in one storage.",
    "Makes the parameters stream whose state shares bytes with one that does.",
    "An endless one that a `return` alone leaves returns that once it is ended.",
    "Nothing waits before a tensor is asked for, so who asks a batch later hardly waits.",
    "A save without it, or with NaN, is none of the best.",
    "Some make passes before their optimizer, to draw a start from gradients: what was ended "
    "begins anew with the first step of one.",
    "each parameter is stepped, wholly and with its state, or as it was; one that is stepped in "
    "cuts may be so up to an element.",
)
PLAIN = (
    "It says what it costs. It shows when and where memory goes.",
    "What does it cost?",
    "The line where it fails says what to do.",
    "The report shows you exactly what grows.",
    "A value that a dry run does not compute is a placeholder.",
)


@pytest.mark.parametrize("sentence", READ_TWICE)
def test_a_sentence_that_was_read_twice_is_found(sentence: str) -> None:
    assert headless.faults_of(sentence)


@pytest.mark.parametrize("sentence", PLAIN)
def test_a_sentence_in_plain_english_is_not_found(sentence: str) -> None:
    assert headless.faults_of(sentence) == []


def test_pages_are_in_plain_english() -> None:
    texts = (text for text in headless.pages() if not any(each in text.text for each in ALLOWED))
    assert headless.faults(texts) == []


def test_docstrings_of_public_names_are_in_plain_english() -> None:
    assert headless.faults(headless.public_docstrings()) == []


def test_messages_are_in_plain_english() -> None:
    found = headless.faults(headless.messages())
    numbers = Counter(map(place_of, found))
    more = [
        each for each in found if numbers[place_of(each)] > MESSAGES_LEFT.get(place_of(each), 0)
    ]
    assert more == []


def place_of(fault: str) -> str:
    return fault.split("/")[0]


def test_texts_of_a_page_are_its_paragraphs_cells_and_list_items() -> None:
    page = "# What it is\n\nOne\nparagraph.\n- item\n\n| a | b |\n|---|---|\n| `x` | [y](z) |\n"
    page += "```sh\nwhat is run\n```\n"
    texts = [text for text in headless.texts_of_page(page) if text.text]
    assert [text.text for text in texts if not text.is_label] == [
        "One paragraph.", "- item", "---", "---", "X", "[y]".strip("[]"),
    ]  # fmt: skip
    assert [text.text for text in texts if text.is_label] == ["What it is", "a", "b"]


def test_every_door_has_docstrings_that_are_looked_at() -> None:
    places = {text.place.partition(":")[0] for text in headless.public_docstrings() if text.text}
    assert {"__init__.py", "_optim/_offload.py", "testing/_verify_resume.py"} < places
    assert "integrations/lightning/_checkpoint_io.py" in places
