"""``python -m benchmarks.published``: its rows, and what the docs say of the newest report.

The runs themselves need LitGPT's sources, and an hour.
"""

from __future__ import annotations

import importlib
import math
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "how-to" / "will-it-fit.md"


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.published.__main__")


def test_a_row_has_what_was_published_and_how_far_the_script_was_from_it(published: Any) -> None:
    run = published.Run("8641822b3249", "lora", "phi-1_5", 4.82, 1)
    assert published.row(run, [4.83]) == (
        "| phi-1_5, lora, micro batch 1, at 8641822 | a100-40g | 4.82 | 4.83 | +0.21 % |"
    )
    assert published.row(run, [None]).endswith("| 4.82 | the script failed |  |")
    assert published.row(run, [math.inf]).endswith("| 4.82 | out of memory | +inf % |")
    assert published.row(run, [4.5, 5.0]).endswith("| 4.82 | 4.50 to 5.00 |  |")
    none = published.Run(published.CONFIGS, "full", "llama-2-7b", None, ranks=4)
    assert published.row(none, [math.inf]).startswith(
        "| llama-2-7b, full, 4 GPUs, at 5895df1 | a10g | out of"
    )


def test_only_constants_of_the_script_are_changed(published: Any, tmp_path: Path) -> None:
    script = tmp_path / "finetune" / "lora.py"
    script.parent.mkdir()
    script.write_text("micro_batch_size = 4\nother = micro_batch_size\ndevices = 1  # GPU\n")
    run = published.Run("8641822b3249", "lora", "phi-1_5", 4.82, 2, 8)
    checkpoint, (changed, *options) = published._command(run, tmp_path, "alpaca_long")
    lines = Path(changed).read_text().splitlines()
    assert lines == ["micro_batch_size = 2", "other = micro_batch_size", "devices = 8  # GPU"]
    assert options[:2] == ["--data_dir=data/alpaca_long", f"--checkpoint_dir={checkpoint}"]


def test_a_clone_has_its_own_runs_with_the_figures_that_it_published(published: Any) -> None:
    files = {("28c65cd", "ch05/10_llm-training-speed"): "tree"}
    first, second = published.others_in(lambda *asked: files.get(asked, ""))
    assert (first.published, second.device) == (26.2617, "a100-40g")
    assert first.figure_in("Allocated memory: 2.50 GB\nReserved memory: 26.2617 GB\n") == 26.2617
    assert first.figure_in("") is None
    assert list(published.others_in(lambda *asked: "")) == []


def test_the_docs_have_the_figures_of_the_newest_report(published: Any) -> None:
    report = max((ROOT / "benchmarks" / "reports").glob("*_simulated_published.md")).read_text()
    titles = [run.title for run in (*published.OF_TABLES, *published.OF_CONFIGS)]
    rows = re.findall(r"^\| (.*, at \w+) \|.*\| ([+-][\d.]+)? ?%? ?\|$", report, re.M)
    assert {title for title, _ in rows} <= set(titles)
    errors = [abs(float(error)) for _, error in rows if error]
    near = sum(each <= 0.5 for each in errors)
    page = " ".join(PAGE.read_text().split())
    assert f"{near} of {len(errors)} peaks" in page
    assert near == len(errors) or f"the others by {max(errors):.1f} % at most" in page
