"""Every Python example of the README and the docs runs, and the site has every page and name."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pasted_pages
import pytest
import torch
from literals import literal_text
from pasted_pages import blocks_of, paste
from source_rules import parse_sources, sources

from residency import _errors
from residency._cli import _main

ROOT = Path(__file__).resolve().parents[1]
SOURCES = os.pathsep.join([str(ROOT / "src"), str(ROOT / "sim" / "src")])
# The others import their frameworks.
INTEGRATIONS = ("lightning", "transformers", "dcp", "prime_rl", "trl", "llamafactory", "verl")


ALL_PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
PAGES = [page for page in ALL_PAGES if any(not block.file for block in blocks_of(page))]
FIRST_PAGES = {"README.md", "save-and-resume.md"}  # the others, on a device, in the second tier


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # said of dcp on one process
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # asked for by PEFT
# Lightning asks torch's pytree in a way that torch 2.13 gives up, and gives advice.
@pytest.mark.filterwarnings(
    "ignore:.*LeafSpec:FutureWarning", "ignore:.*does not have many workers"
)
@pytest.mark.filterwarnings("ignore:GPU available but not used")
@pytest.mark.sim_device(schedule="late")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[] if page.name in FIRST_PAGES else [pytest.mark.whole])
        for page in PAGES
    ],
    ids=lambda page: page.name,
)
def test_the_blocks_of_a_page_run_on_the_device_as_pasted(
    page: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # where the examples' files go
    # Accelerate finds accelerators by name, and does not know the simulated one's.
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", str(device))
    paste(page)


@pytest.mark.whole
def test_the_blocks_of_the_docs_run_in_fresh_processes_without_an_accelerator() -> None:
    ran = _pasted(*map(str, PAGES))
    assert ran.returncode == 0, ran.stderr


def _pasted(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `pasted_pages` in a process that sees no accelerator."""
    hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": SOURCES}
    command = [sys.executable, pasted_pages.__file__, *arguments]
    env = {**os.environ, **hidden}
    return subprocess.run(command, capture_output=True, text=True, env=env)


@pytest.mark.whole
@pytest.mark.parametrize("name", ["tutorial", "index"])
def test_a_page_for_beginners_shows_what_its_blocks_print(name: str) -> None:
    page = ROOT / "docs" / f"{name}.md"
    shown = re.findall(r"^```python\n.*?^```\n\n```text\n(.*?)^```", page.read_text(), re.M | re.S)
    assert len(shown) >= 2
    ran = _pasted(str(page))
    assert ran.returncode == 0, ran.stderr
    printed = iter(ran.stdout.splitlines())
    for line in "".join(shown).splitlines():
        if line == "...":  # lines that the page leaves out
            continue
        begin = line.removesuffix(" ...")
        assert any(begin == each[: len(begin)] for each in printed), f"{line!r} is not printed next"


def test_every_block_is_python() -> None:
    for page in ALL_PAGES:
        for block in blocks_of(page):
            compile(block.source, str(page), "exec")


@pytest.mark.whole
def test_a_run_that_lost_a_rank_ends_on_one_rank_at_the_sum_of_stock_torch(tmp_path: Path) -> None:
    (script,) = blocks_of(ROOT / "docs" / "how-to" / "train-on-several-ranks.md")
    assert script.file
    (tmp_path / script.file).write_text(script.source)

    resumed = _pasted("--ranks", str(tmp_path / script.file))
    assert resumed.returncode == 0, resumed.stderr
    found = re.fullmatch(r"steps (\d) to 7, sum (\S+)\n", resumed.stdout)
    assert found, resumed.stdout
    assert found[1] in "45"
    assert found[2] == f"{_sum_of_stock_torch():.10f}"


def _sum_of_stock_torch() -> float:
    """Returns what the page's script sums up, of a plain loop on the host."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(8):
        rows = torch.randn(32, 256, generator=torch.Generator().manual_seed(step))
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return sum(p.double().abs().sum().item() for p in model.parameters())


def test_links_between_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text()):
            linked = page.parent / target if target else page
            assert linked.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in _anchors(linked), f"{page.name}: {target}#{anchor}"


def _anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


def test_a_table_has_no_row_that_is_longer_than_a_few_lines() -> None:
    for page in ALL_PAGES:
        for number, line in enumerate(page.read_text().splitlines(), start=1):
            is_list_of_names = line.count("`") > 100  # which classes of a package were tried
            is_row = line.startswith("|")
            assert len(line) <= 620 or not is_row or is_list_of_names, f"{page.name}:{number}"


def test_commands_of_the_pages_are_those_of_the_command_line_and_of_make() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    num_commands = 0
    for page in ALL_PAGES:
        for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(), flags=re.M | re.S):
            for line in block.replace("\\\n", "").splitlines():
                if not line.startswith(("residency ", "make ")):
                    continue
                words = shlex.split(line, comments=True)
                if words[0] == "residency":
                    _main._make_parser().parse_args(words[1:])  # raises SystemExit where it cannot
                    num_commands += 1
                else:
                    assert words[1] in targets, f"{page.name}: {line}"
    assert num_commands > 5


def test_the_costs_are_those_of_the_reports() -> None:
    page = (ROOT / "docs" / "explanation" / "costs.md").read_text()
    rows = re.findall(r"^\|.*?\|(.*?)\|(.*?)\| `(\d[\w-]+\.md)` \|$", page, flags=re.MULTILINE)
    assert len(rows) >= 5
    for with_it, without, name in rows:
        report = (ROOT / "benchmarks" / "reports" / name).read_text()
        for figure in re.findall(r"\d+\.\d+|\d+(?= µs)", with_it + without):
            assert re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.])", report), (name, figure)


def _texts_of_the_sources() -> list[str]:
    """Returns every literal of the package, with a mark where a value is filled in."""
    texts = []
    for tree in parse_sources().values():
        found = (literal_text(node, "\0") for node in ast.walk(tree))
        texts += [text for text in found if text is not None]
    for _, path in sources(".cpp"):
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


@pytest.mark.parametrize("name", ["axolotl", "torchtitan", "xtuner"])
def test_the_names_of_what_imports_its_framework_stand_in_the_reference(name: str) -> None:
    text = (ROOT / "docs" / "reference" / "api" / "integrations.md").read_text()
    section = text.partition(f"## `residency.integrations.{name}`")[2].partition("\n## ")[0]
    folder = ROOT / "src" / "residency" / "integrations"
    file = folder / f"{name}.py"
    source = (file if file.exists() else folder / name / "__init__.py").read_text()
    (public,) = re.findall(r"^__all__ = (\[.*?\])$", source, flags=re.M | re.S)
    for each in ast.literal_eval(public):
        assert f"`{each}" in section


@pytest.mark.parametrize(
    ("module", "page"),
    [
        ("residency", "residency"),
        ("residency.types", "types"),
        ("residency.sim", "sim"),
        ("residency.testing", "testing"),
        *((f"residency.integrations.{name}", "integrations") for name in INTEGRATIONS),
    ],
)
def test_every_public_name_stands_in_the_reference(module: str, page: str) -> None:
    text = (ROOT / "docs" / "reference" / "api" / f"{page}.md").read_text()
    directives = r"^\.\. auto(?:function|class|exception):: ([\w.]+)$"
    described = set(re.findall(directives, text, flags=re.MULTILINE))
    public = importlib.import_module(module).__all__
    modules = {"sim", "testing"} if module == "residency" else set()  # have pages of their own
    assert {f"{module}.{name}" for name in set(public) - modules} == {
        name for name in described if name.rpartition(".")[0] == module
    }


@pytest.mark.whole
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    built = subprocess.run(
        [*command, "-d", str(tmp_path / "trees"), str(ROOT / "docs"), str(tmp_path / "site")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCES},
    )
    assert built.returncode == 0, built.stderr
    index = _page(tmp_path, "index")
    for file in ("site.css", "site.js"):  # for wide output, narrow screens and keys
        assert file in index
        assert (tmp_path / "site" / "_static" / file).is_file()
    words = set(re.findall('id="(word-[^"]*)"', _page(tmp_path, "explanation/vocabulary")))
    linked = {
        page: _linked_words(_page(tmp_path, page)) for page in ("how-to/save-and-resume", "index")
    }
    assert "word-shard" in linked["how-to/save-and-resume"]
    assert "word-transition" in linked["index"]
    for of_page in linked.values():
        assert len(of_page) == len(set(of_page)), "a word is linked at its first use only"
        assert set(of_page) <= words


def _page(folder: Path, name: str) -> str:
    return (folder / "site" / f"{name}.html").read_text()


def _linked_words(html: str) -> list[str]:
    return re.findall(r'href="[^"]*vocabulary\.html#(word-[^"]*)"', html)
