"""Every Python example of the README and the docs runs, on the accelerator under test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


def _examples(page: Path) -> list[str]:
    """Returns the blocks that stand for themselves: one that opens with a file's name is a file."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    return [block for block in blocks if not re.match(r"# \w+\.py\n", block)]


PAGES = sorted(p for p in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")] if _examples(p))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_of_a_page_run(page: Path, device: torch.device) -> None:
    # What a reader has before the first line: a model on the accelerator.
    names = {"torch": torch, "model": torch.nn.Linear(8, 8).to(device)}
    for example in _examples(page):
        exec(compile(example, str(page), "exec"), names)


def test_links_between_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
