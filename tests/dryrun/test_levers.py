"""What ``--fit`` changes in a script, each on a device on which it fits with that change alone."""

import argparse
import copy
import weakref
from pathlib import Path

import pytest
import torch

from residency._dryrun import RunSettings
from residency._dryrun._levers import Levers, _wrap_blocks

SCRIPT = Path(__file__).parent / "scripts" / "levers.py"
# What the script does, MiB beside the context, the change that makes it fit, and a line to add.
CASES = {
    "a resume by way of the host": (
        ("resumes",), 640, "files are loaded by way of the host", 'map_location="cpu"',
    ),
    "a save without copies": (
        ("copies",), 660, "saves without a copy on the device", "residency.Checkpointer(folder)",
    ),
    "a deferred state": (
        ("resumes-and-evaluates",), 1520,
        "a resume that leaves the optimizer's state on the host until the first step",
        "checkpointer.restore",
    ),
    "a parked state": (
        ("evaluates",), 1520,
        "the optimizer's state parked while the script evaluates or generates",
        "residency.park(optimizer)",
    ),
    "an offloaded state": (
        ("trains", "--width", "6144"), 4200, "the optimizer's state on the host",
        "residency.offload_optimizer(optimizer, resident=",
    ),
    "recomputed blocks": (
        ("trains", "--batch-size", "20000"), 2700, "gradient checkpointing",
        "torch.utils.checkpoint.checkpoint(block",
    ),
    "smaller batches": (
        ("trains", "--batch-size", "20000", "--gradient-checkpointing"), 2700,
        "batches of 1/2, with 2 times the accumulation", "--batch-size 10000 --accumulation 2",
    ),
}  # fmt: skip


@pytest.mark.whole
@pytest.mark.parametrize("case", CASES)
def test_a_script_that_does_not_fit_fits_with_one_change_and_is_told_the_lines(
    dry_run, case
) -> None:
    arguments, room, name, line = CASES[case]
    options = ("--capacity", f"{534 + room}MiB", "--fit")
    outcome = dry_run(SCRIPT, *arguments, options=options)
    assert outcome.status == 1, outcome.errors
    tried = outcome.answer["fit"]
    assert [each["fits"] for each in tried] == [False] * (len(tried) - 1) + [True], outcome.errors
    assert tried[-1]["name"] == name
    assert any(line in each for each in tried[-1]["lines"]), tried[-1]
    assert tried[-1]["needed"] <= (534 + room) << 20 < outcome.answer["needed"]


@pytest.mark.whole
def test_where_nothing_helps_it_is_said_how_much_is_missing(dry_run) -> None:
    outcome = dry_run(SCRIPT, "trains", options=("--capacity", f"{534 + 100}MiB", "--fit"))
    assert outcome.status == 1
    assert outcome.answer["fit"] == []
    assert "nothing that is known here" in outcome.errors
    assert "missing still" in outcome.errors


def test_the_command_has_the_arguments_that_a_search_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    parsers = argparse.ArgumentParser
    monkeypatch.setattr(parsers, "parse_known_args", parsers.parse_known_args)
    given: dict[str, int | bool] = {"batch_size": 37, "recompute": True, "of_another_script": 1}
    levers = Levers(RunSettings(folder="", capacity=0, arguments=given))
    levers.start()
    parser = parsers()
    parser.add_argument("-b", "--batch-size", type=int, default=8)
    parser.add_argument("--recompute", action="store_true")
    assert parser.parse_args([]).batch_size == 37
    assert levers.words() == ["--batch-size", "37", "--recompute"]
    assert vars(parser.parse_args(levers.words())) == {"batch_size": 37, "recompute": True}


class Block(torch.nn.Module):
    """A block that counts its passes."""

    passes = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Block.passes += 1
        return self.inner(x).relu()


def test_blocks_that_recompute_go_with_their_model_and_copies_have_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Block, "forward", Block.forward)
    model = torch.nn.Sequential(*(Block() for _ in range(3)))
    assert _wrap_blocks(model) == "its blocks"
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        parameter.data.zero_()
    model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert Block.passes == 6
    assert Block()(torch.ones(2, 4)).requires_grad
    assert Block.passes == 7
    assert not copied(torch.ones(2, 4)).any()
    assert all(block.inner.weight.grad is None for block in copied)
    block = weakref.ref(model[0])
    del model
    assert block() is None
