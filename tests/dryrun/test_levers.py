"""What ``--fit`` changes in a script, each on a device on which it fits with that change alone, and
the lines that it prints, in the script where a user would add them.
"""

import argparse
import copy
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from tests.dryrun.pasting import pasted

from residency._dryrun import RunSettings
from residency._dryrun._levers import Levers, _wrap_blocks
from residency._dryrun._resumes import Loads

SCRIPTS = Path(__file__).parent / "scripts"
CONTEXT = 534  # MiB
NEAR = 32 << 20  # a segment or two of torch's allocator
# The script and its arguments, options, MiB beside the context, the change that makes it fit, and a
# line to add.
CASES = {
    "joined pieces": (
        ("levers.py", "pieces"), (), 780, "segments that grow", "expandable_segments:True",
    ),
    "a resume by way of the host": (
        ("levers.py", "resumes"), (), 640, "files are loaded by way of the host",
        'map_location="cpu"',
    ),
    "a save without copies": (
        ("levers.py", "copies"), (), 660, "saves without a copy on the device",
        "residency.Checkpointer(folder)",
    ),
    "a deferred state": (
        ("levers.py", "resumes-and-evaluates"), (), 1520,
        "a resume that leaves the optimizer's state on the host until the first step",
        "checkpointer.restore",
    ),
    "a deferred state of torch's recipe": (
        ("resumes_by_dcp.py", "recipe"), (), 1300,
        "a resume by TrainState, with the optimizer's state on the host until the first step",
        "state = TrainState(model, optimizer)",
    ),
    "a deferred state of one rank's shards": (
        ("resumes_by_dcp.py", "stateful"), ("--ranks", "2"), 1400,
        "a resume by TrainState, with the optimizer's state on the host until the first step",
        'dcp.load({"app": state}',
    ),
    "views of buckets, loop": (
        ("replicas.py", "loop"), ("--ranks", "2"), 340, "gradients as views of DDP's buckets",
        "DistributedDataParallel(...",
    ),
    "views of buckets, accelerate": (
        ("replicas.py", "accelerate"), ("--ranks", "2"), 340, "gradients as views of DDP's buckets",
        "kwargs_handlers=[DistributedDataParallelKwargs(",
    ),
    "views of buckets, lightning": (
        ("replicas.py", "lightning"), ("--ranks", "2"), 340, "gradients as views of DDP's buckets",
        "strategy=DDPStrategy(",
    ),
    "a parked state": (
        ("levers.py", "evaluates"), (), 1520,
        "the optimizer's state parked while the script evaluates or generates",
        "with residency.parked(optimizer):  # around",
    ),
    "an offloaded state": (
        ("levers.py", "trains", "--width", "6144"), (), 4200, "the optimizer's state on the host",
        "residency.offload_optimizer(optimizer, resident=",
    ),
    "recomputed blocks": (
        ("levers.py", "trains", "--batch-size", "20000"), (), 2700, "gradient checkpointing",
        "functools.partial(checkpoint, block.forward",
    ),
    "smaller batches": (
        ("levers.py", "trains", "--batch-size", "20000", "--gradient-checkpointing"), (), 2700,
        "batches of 1/2, with 2 times the accumulation", "--batch-size 10000 --accumulation 2",
    ),
    "the best adapter of a Trainer": (
        ("best_adapter.py", "--rows", "1"), (), 440, "files are loaded by way of the host",
        "Trainer(..., callbacks=[ResidencyCallback(offload=False)])",
    ),
    "the best adapter and the state of a Trainer": (
        ("best_adapter.py", "--rows", "1", "--tunes"), (), 690, "the optimizer's state on the host",
        "Trainer(..., callbacks=[ResidencyCallback(resident=",
    ),
    "batches of a Trainer": (
        ("best_adapter.py", "--rows", "2", "--sequence", "1024"), (), 1100,
        "batches of 1/2, with 2 times the accumulation",
        "TrainingArguments(..., per_device_train_batch_size=1, gradient_accumulation_steps=2)",
    ),
    "recomputed blocks of a Trainer": (
        ("best_adapter.py", "--rows", "2", "--sequence", "1024", "--vocabulary", "4096",
         "--layers", "8"), (), 800, "gradient checkpointing",
        "model.gradient_checkpointing_enable()",
    ),
}  # fmt: skip

KEYS = ("name", "suits", "verdict", "lines", "cost", "fits", "needed", "error")


@pytest.mark.whole
@pytest.mark.parametrize("case", CASES)
def test_a_script_fits_with_the_cheapest_change_and_with_the_lines_that_are_printed(
    dry_run, case, monkeypatch: pytest.MonkeyPatch
) -> None:
    (script, *arguments), options, room, name, line = CASES[case]
    text = (SCRIPTS / script).read_text()
    device = (*options, "--capacity", f"{CONTEXT + room}MiB", "--others", "0B")
    outcome = dry_run(text, *arguments, options=(*device, "--fit"))
    assert outcome.status == 1, outcome.errors
    tried = outcome.answer["fit"]
    assert [each["fits"] for each in tried] == [False] * (len(tried) - 1) + [True], outcome.errors
    assert tried[-1]["name"] == name
    # As docs/reference/dry-run.md lists them; sizes end in _bytes there.
    assert all(set(each) == {*KEYS} for each in tried)
    assert any(line in each for each in tried[-1]["lines"]), tried[-1]
    assert tried[-1]["needed"] <= (CONTEXT + room) << 20 < outcome.answer["needed"]

    lines, words = [], []
    for each in tried[-1]["lines"]:
        if each.startswith("export "):
            monkeypatch.setenv(*each.removeprefix("export ").split("=", 1))
        elif each.startswith("--"):
            words += each.split()
        else:
            lines.append(each)
    again = dry_run(pasted(text, lines), *arguments, *words, options=device)
    assert again.status == 0, again.errors
    assert abs(again.answer["needed"] - tried[-1]["needed"]) <= NEAR, again.errors


@pytest.mark.whole
def test_where_nothing_helps_it_is_said_how_much_is_missing(dry_run) -> None:
    outcome = dry_run(
        SCRIPTS / "levers.py", "trains", options=("--capacity", f"{534 + 100}MiB", "--fit")
    )
    assert outcome.status == 1
    assert outcome.answer["fit"] == []
    assert "nothing that is known here" in outcome.errors
    assert "missing still" in outcome.errors


@pytest.fixture
def changes_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes back what levers change in this process, and changes no module of others."""
    monkeypatch.setattr("residency._dryrun._resumes.ImportWatch.start", lambda watch: None)
    for owner, name in (
        (torch, "load"),
        (torch.optim.Optimizer, "load_state_dict"),
        (argparse.ArgumentParser, "parse_known_args"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))


AVERAGED = """
import torch
net = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(4))).cuda()
optimizer = torch.optim.AdamW(net.parameters())
average = {name: value.clone() for name, value in net.state_dict().items()}
for _ in range(4):
    net(torch.randn(8, 2048).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    for name, value in net.state_dict().items():
        average[name].lerp_(value, 0.01)
torch.save({name: value.clone() for name, value in average.items()}, "average.pt")
"""


@pytest.mark.whole
def test_a_change_that_breaks_a_script_does_not_suit_it_and_no_value_is_blamed(dry_run) -> None:
    size = ("--capacity", f"{CONTEXT + 360}MiB", "--others", "0B")
    outcome = dry_run(AVERAGED, options=(*size, "--fit"))
    said = "saves without a copy on the device: does not suit this script: RuntimeError: Expected"
    assert said in outcome.errors
    shown = outcome.errors.partition("changes that make it fit")[2]
    assert "a dry run does not compute" not in shown
    tried = outcome.answer["fit"]
    assert [each["suits"] for each in tried] == [False] + [True] * (len(tried) - 1)
    assert tried[-1]["fits"]


COPIES = """
import copy, torch
from residency import sim
sim.enable("1GiB", device="cuda", dry=True, schedule="eager")
from residency._dryrun._levers import _clone_on_host
_clone_on_host()
net = torch.nn.Linear(1024, 1024).cuda()
net.register_buffer("mask", torch.ones(1024, 1024, device="cuda"))
for copied in (copy.deepcopy(net), copy.deepcopy({"net": net})["net"]):
    print(*(each.device.type for each in (copied.weight, copied.bias, copied.mask)))
for state in (copy.deepcopy(net.state_dict()), {"weight": net.state_dict()["weight"].clone()}):
    print(state["weight"].device.type)
"""


def test_copies_for_a_save_go_to_the_host_and_those_of_modules_are_let_be() -> None:
    command = [sys.executable, "-c", COPIES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["cuda cuda cuda"] * 2 + ["cpu"] * 2, done.stderr


def test_the_command_has_the_arguments_that_a_search_gave(changes_end: None) -> None:
    parsers = argparse.ArgumentParser
    given: dict[str, int | bool] = {"batch_size": 37, "recompute": True, "of_another_script": 1}
    levers = Levers(RunSettings(folder="", capacity=0, arguments=given))
    levers.start()
    parser = parsers()
    parser.add_argument("-b", "--batch-size", type=int, default=8)
    parser.add_argument("--recompute", action="store_true")
    assert parser.parse_args([]).batch_size == 37
    assert levers.words() == ["--batch-size", "37", "--recompute"]
    assert vars(parser.parse_args(levers.words())) == {"batch_size": 37, "recompute": True}


def test_a_state_without_tensors_is_no_resume(changes_end: None) -> None:
    """Accelerate, and with it a Trainer, gives an optimizer its own state when it prepares it."""
    loads = Loads(on_host=False)
    loads.start()
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight])
    optimizer.load_state_dict(optimizer.state_dict())
    assert not loads.have_state
    weight.sum().backward()
    optimizer.step()
    optimizer.load_state_dict(state_dict=optimizer.state_dict())
    assert loads.have_state
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
    assert loads.have_state


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
    assert _wrap_blocks(model) == [""]
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
