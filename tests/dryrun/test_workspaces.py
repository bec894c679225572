"""cuDNN's workspaces in an answer: what a run needs, and what convolutions may take beside it."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from tests.dryrun.facts import MIB, facts

from residency._dryrun._workspaces import Workspaces, lines_of_workspaces
from residency.sim import gpu_named

SCRIPT = """
import sys
import torch

torch.backends.cudnn.benchmark = "benchmark" in sys.argv
if "before" in sys.argv:
    torch.empty(1 << 30, device="cuda")
layout = torch.channels_last if "last" in sys.argv else torch.contiguous_format
model = torch.nn.Sequential(
    torch.nn.Conv2d(64, 64, 3, padding=1), torch.nn.ReLU(inplace=True), torch.nn.Conv2d(64, 128, 3)
)
model = model.to("cuda", memory_format=layout)
images = torch.randn(32, 64, 56, 56, device="cuda").to(memory_format=layout)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    results = model(images)
    assert results.is_contiguous(memory_format=layout)
    results.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
IMAGES, RESULTS = 32 * 64 * 56 * 56 * 4, 32 * 128 * 54 * 54 * 4
COPIES = IMAGES + RESULTS + 128 * 64 * 9 * 4
SUMS = 132 * 128 * 256 * 4  # of as many blocks as an H100 runs at once


def run(dry_run: Any, *words: str, options: tuple[str, ...] = ("--device", "h100")) -> Any:
    outcome = dry_run(SCRIPT, *words, options=options)
    assert outcome.status == 0, outcome.errors
    return outcome


def test_the_workspace_lies_beside_what_the_script_needs(dry_run: Any) -> None:
    outcome = run(dry_run)
    answer, workspaces = outcome.answer, outcome.answer["workspaces"]
    more = workspaces["peak_allocated"] - answer["peak_allocated"]
    assert COPIES <= more <= COPIES + SUMS + MIB
    assert workspaces["most"] >= more - MIB
    assert workspaces["most"] == workspaces["peak_reserved"] - answer["peak_reserved"]
    assert workspaces["reason"] == "layout"
    assert not answer["tries_plans"]
    assert answer["rests_on"].startswith("memory of kernels measured on an H100")
    assert "cuDNN may take up to" in outcome.errors
    assert "channels_last" in outcome.errors


def test_the_verdict_follows_the_need(dry_run: Any) -> None:
    needed = run(dry_run).answer["needed"]
    close = run(dry_run, options=("--device", "h100", "--capacity", f"{needed + 4 * MIB}B"))
    assert close.answer["workspaces"]["most"] > close.answer["headroom"] >= 0


def test_with_channels_last_no_copies_are_made(dry_run: Any) -> None:
    answer = run(dry_run, "last").answer
    assert answer["workspaces"]["most"] <= SUMS + 22 * MIB  # and a segment's rest
    assert answer["workspaces"]["reason"] == "kernels"


def test_a_peak_without_a_convolution_has_no_workspace(dry_run: Any) -> None:
    outcome = run(dry_run, "before", options=("--capacity", "8GiB"))
    assert outcome.answer["workspaces"] is None
    assert outcome.answer["rests_on"].startswith("no card was named")
    assert "cuDNN" not in outcome.errors


def test_the_trials_of_benchmark_are_shown_apart(dry_run: Any) -> None:
    outcome = run(dry_run, "benchmark")
    answer, workspaces = outcome.answer, outcome.answer["workspaces"]
    assert answer["tries_plans"]
    assert workspaces["reason"] == "benchmark"
    assert workspaces["largest"] > COPIES + SUMS
    assert answer["peak_reserved"] < workspaces["peak_reserved_without_benchmark"]
    assert workspaces["peak_reserved_without_benchmark"] < workspaces["peak_reserved"]
    assert "torch.backends.cudnn.benchmark" in outcome.errors


def test_the_figures_of_each_card_rest_on_something_that_is_named() -> None:
    assert "compared with 18 peaks measured on it" in gpu_named("h200")[1].rests_on
    assert "by the rules in torch's sources for its architecture" in gpu_named("t4")[1].rests_on
    assert "compared with no peak of this card" in gpu_named("rtx4090")[1].rests_on


def test_a_script_that_tries_plans_hears_so_where_they_change_nothing() -> None:
    (line,) = lines_of_workspaces(facts(tries_plans=True), 5 * MIB)
    assert line.endswith("they do not raise the peak")
    assert list(lines_of_workspaces(facts(), 5 * MIB)) == []


class Card:
    def __init__(self, *peaks: int) -> None:
        self.found = peaks
        self.journal = b""

    def read(self, journal: bytes) -> None:
        self.journal += journal

    def peaks(self) -> tuple[int, ...]:
        return self.found


@pytest.mark.parametrize(("note", "words"), [(1, ""), (2, "channels_last"), (3, "benchmark")])
def test_each_reason_has_its_advice(note: int, words: str) -> None:
    cards: Any = Card(9 * MIB, 10 * MIB, note, 3 * MIB, note == 3), Card(9 * MIB, 7 * MIB, 1, 1, 0)
    workspaces = Workspaces(*cards)
    workspaces.read(b"1")
    assert [card.journal for card in cards] == [b"1", b"1"]
    lines = list(lines_of_workspaces(facts(**workspaces.found()), 6 * MIB))
    assert "up to 4.00 MiB more" in lines[0]
    assert len(lines) == 1 + bool(words)
    assert words in lines[-1]
    assert note != 3 or "without it the most is 1.00 MiB" in lines[-1]


def test_help_begins_with_the_three_questions() -> None:
    command = [sys.executable, "-m", "residency", "dry-run", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    first = list(_paragraphs(shown))[1]
    assert "Will it fit, with which batch, and which changes make it fit?" in first


def _paragraphs(text: str) -> Iterator[str]:
    yield from (" ".join(each.split()) for each in text.split("\n\n"))
