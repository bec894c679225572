"""Each recipe is a page and a script: the page shows lines of the script and its very output.

A script asserts what its page promises and ends with an error if that does not hold.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from pasted_pages import blocks_of

ROOT = Path(__file__).resolve().parents[1]
SOURCES = os.pathsep.join([str(ROOT / "src"), str(ROOT / "sim" / "src")])
SCRIPTS = sorted((ROOT / "examples" / "recipes").glob("*.py"))
PACKAGES: dict[str, tuple[str, ...]] = {  # beside torch
    "averages.py": (),
    "clean_start.py": (),
    "lora_of_32b.py": ("peft", "transformers"),
    "make_it_fit.py": ("peft", "transformers"),
    "merge_adapter.py": ("peft", "transformers"),
    "preemption.py": (),
    "previews.py": (),
    "two_models.py": (),
}


def page_of(script: Path) -> Path:
    call = f"python examples/recipes/{script.name}"
    (page,) = [page for page in ROOT.glob("docs/how-to/*.md") if call in page.read_text()]
    return page


def output_on(page: Path) -> str:
    """Returns the first output that a page shows after the command of its recipe."""
    _, _, text = page.read_text().partition("python examples/recipes/")
    found = re.search(r"^```text\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert found, f"{page.name} shows no output"
    return found[1]


def same_everywhere(text: str) -> str:
    """Returns an output without times, and without sums that a kernel of another CPU changes."""
    return re.sub(r"\d+(?:\.\d+)? (?=m?s\b)|(?<=sum )[0-9a-f]{8}", "# ", text)


def test_every_recipe_has_its_page_in_the_index_and_names_its_packages() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    assert {script.name for script in SCRIPTS} == set(PACKAGES)
    for script in SCRIPTS:
        assert f"how-to/{page_of(script).stem}\n" in index


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_page_shows_lines_that_stand_in_its_script(script: Path) -> None:
    lines = script.read_text()
    shown = [block for block in blocks_of(page_of(script)) if block.file == script.name]
    assert shown or script.name == "make_it_fit.py"  # whose page shows commands
    for block in shown:
        for excerpt in block.source.partition("\n")[2].split("\n...\n"):
            indents = [textwrap.indent(excerpt, " " * width).strip("\n") for width in (0, 4, 8)]
            assert any(f"{each}\n" in lines for each in indents), excerpt


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_page_shows_what_a_user_needs_on_its_first_screen(script: Path) -> None:
    text = page_of(script).read_text()
    assert len(text.partition("**Next:**")[0].splitlines()) <= 45
    assert "**Next:**" in text


def output_of(script: Path, *options: str, folder: Path) -> str:
    paths = os.pathsep.join([SOURCES, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        [sys.executable, str(script), *options],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, **hidden},
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.whole
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_keeps_its_promise_and_prints_what_its_page_shows(
    script: Path, tmp_path: Path
) -> None:
    for package in PACKAGES[script.name]:
        pytest.importorskip(package)
    assert same_everywhere(output_of(script, folder=tmp_path)) == same_everywhere(
        output_on(page_of(script))
    )


@pytest.mark.whole
def test_a_study_of_optunas_starts_each_trial_on_a_clean_device(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    script = ROOT / "examples" / "recipes" / "clean_start.py"
    assert output_of(script, "--optuna", folder=tmp_path) == output_on(page_of(script))
