"""Runs of the scripts of LLMs-from-scratch, beside the peaks that their author published.

The book that they download is made up of words here, and so are the two packages that they need for
its tokens and for a picture.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

BOOK = "ch05/10_llm-training-speed"
_TOKENIZER_OF_BOOK = """
class Words:
    def encode(self, text, allowed_special=()):
        return [sum(word.encode()) % 50000 for word in text.split()]
    def decode(self, ids):
        return " ".join(f"w{each}" for each in ids)
def get_encoding(name):
    return Words()
"""
_PICTURES = """
from unittest.mock import MagicMock
def subplots(**options):
    return MagicMock(), MagicMock()
def savefig(file):
    pass
"""


@dataclass(frozen=True)
class Other:
    """A run whose peak its authors published.

    Attributes:
        title: What the report calls it, with the unit of its authors.
        commit: The sources that it is made with.
        device: The GPU, as ``--device`` names it.
        published: Their figure.
        folder: Where the script is.
        words: The script and its arguments.
        prepare: Makes what it reads, in that folder.
        said: How its output has the predicted figure.
    """

    title: str
    commit: str
    device: str
    published: float
    folder: str
    words: tuple[str, ...]
    prepare: Callable[[Path], None]
    said: str

    def figure_in(self, output: str) -> float | None:
        """Returns the predicted figure; None where there is none."""
        found = re.search(self.said, output, re.MULTILINE)
        return float(found[1]) if found else None


def others_in(show: Callable[[str, str], str]) -> Iterator[Other]:
    """Yields the runs of a clone; none for a clone of another project.

    Args:
        show: Returns a file of a commit, or nothing where there is none.
    """
    commit = "28c65cd"
    if show(commit, BOOK):
        for script, reserved, title in (
            ("00_orig.py", 26.2617, "GPT-2 124M, fp32, batch 8"),
            ("01_opt_single_gpu.py", 22.5078, "GPT-2 124M, bf16, batch 32 (compiled there)"),
        ):
            said = r"^Reserved memory: ([\d.]+) GB$"
            yield Other(
                f"LLMs-from-scratch, {title}, GiB, at {commit}", commit, "a100-40g", reserved,
                BOOK, (script,), write_book, said,
            )  # fmt: skip


def write_book(folder: Path) -> None:
    """Makes a book and the two packages of the script that need the network or a screen."""
    (folder / "middlemarch.txt").write_text(" ".join(f"w{n}" for n in range(500_000)))
    (folder / "tiktoken.py").write_text(_TOKENIZER_OF_BOOK)
    (folder / "matplotlib").mkdir(exist_ok=True)
    (folder / "matplotlib" / "__init__.py").touch()
    (folder / "matplotlib" / "pyplot.py").write_text(_PICTURES)
