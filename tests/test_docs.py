"""Every Python example of the README and the docs runs, on the accelerator under test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

from residency import _errors

ROOT = Path(__file__).resolve().parents[1]


def _examples(page: Path) -> list[str]:
    """Returns the blocks that stand for themselves: one that opens with a file's name is a file."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    return [block for block in blocks if not re.match(r"# \w+\.py\n", block)]


PAGES = sorted(p for p in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")] if _examples(p))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # said of dcp on one process
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # asked for by PEFT
# Lightning asks torch's pytree in a way that torch 2.13 gives up, and gives advice.
@pytest.mark.filterwarnings(
    "ignore:.*LeafSpec:FutureWarning", "ignore:.*does not have many workers"
)
@pytest.mark.filterwarnings("ignore:GPU available but not used")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_of_a_page_run(
    page: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # where the examples' files go
    # Accelerate finds accelerators by name, and does not know the simulated one's.
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", str(device))
    # What a reader has before the first line: a model on the accelerator.
    names = {"torch": torch, "model": torch.nn.Linear(8, 8).to(device)}
    for example in _examples(page):
        exec(compile(example, str(page), "exec"), names)


def test_links_between_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def _texts_of_the_sources() -> list[str]:
    """Returns every literal of the package, with a mark where a value is filled in."""
    texts = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [v.value if isinstance(v, ast.Constant) else "\0" for v in node.values]
                texts.append("".join(map(str, parts)))
    for path in (ROOT / "src").rglob("*.cpp"):
        # Adjacent literals are one.
        texts.append(re.sub(r'"\s*"', "", path.read_text()))
    return texts


def test_every_message_that_troubleshooting_quotes_is_one_that_the_sources_contain() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^\| `(\w+): (.*?)` \|", page, flags=re.MULTILINE)
    assert len(quoted) >= 5
    texts = _texts_of_the_sources()
    for name, message in quoted:
        assert name in vars(_errors), f"there is no {name}"
        fragments = [part.strip() for part in message.split("...") if part.strip()]
        # The fragments of one row stand in one message, in this order.
        pattern = ".*".join(map(re.escape, fragments))
        assert any(re.search(pattern, text, flags=re.DOTALL) for text in texts), message
