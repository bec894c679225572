"""Training loops of packages that are installed end as a script's do, and do what they do."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.dryrun.test_rewriting import both

from residency._dryrun._loops import Loops
from residency._dryrun._rewriting import _trains

INNER = """
import torch

class Learner:
    def __init__(self, model, batches):
        self.model, self.batches = model, batches
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def one_epoch(self):
        losses = []
        for batch in self.batches:
            loss = self.model(batch.cuda()).sum()
            loss.backward()
            self.optimizer.step()
            losses.append(1.0)
        self.average = sum(losses) / len(losses)

    def fit(self, evaluate):
        for epoch in range(100):
            self.one_epoch()
            evaluate()
"""
# Around them, in modules that make no backward pass themselves.
OUTER = """
import torch
from trainer.inner import Learner

class Epochs(Learner):
    def learn(self, evaluate):
        while self.train():
            evaluate()

    def train(self):
        self.one_epoch()
        return True
"""
UNKNOWN = """
def run(learner, evaluate):
    number = 0
    while number < 100:
        learner.one_epoch()
        evaluate()
        number += 1
"""
SCRIPT = """
import os, sys, torch
os.makedirs("site-packages/trainer")
for name, text in {"__init__": "", "inner": INNER, "outer": OUTER, "unknown": UNKNOWN}.items():
    with open(f"site-packages/trainer/{name}.py", "w") as file:
        file.write(text)
sys.path.insert(0, "site-packages")
from trainer.inner import Learner
from trainer.outer import Epochs
from trainer import unknown

batches = [torch.ones(2, 4) for _ in range(20)]
loader = torch.utils.data.DataLoader(torch.ones(40, 4), batch_size=2)
evaluations = []

def learner(batches=batches, kind=Learner):
    return kind(torch.nn.Linear(4, 4).cuda(), batches)

def evaluate():
    evaluations.append(1)
"""
SCRIPT = f"INNER, OUTER, UNKNOWN = {INNER!r}, {OUTER!r}, {UNKNOWN!r}\n{SCRIPT}"
TWICE = """
one = learner()
one.fit(evaluate)
assert one.average == 1.0
assert len(evaluations) == 1, evaluations
one.fit(evaluate)
learner(loader).fit(evaluate)
assert len(evaluations) == 3, evaluations
learner(kind=Epochs).learn(evaluate)
assert len(evaluations) == 4, evaluations
torch.save(one.model.state_dict(), "model.pt")
"""
LEFT = """
unknown.run(learner(), evaluate)
torch.save({}, "model.pt")
"""
EMPTIED = """
one = learner(loader)
one.average = 0
try:
    unknown.run(one, evaluate)
except ZeroDivisionError:
    pass
assert len(evaluations) == 1, evaluations
torch.save(one.model.state_dict(), "model.pt")
"""


def test_the_loops_of_a_library_end_and_each_training_is_seen(dry_run: Callable[..., Any]) -> None:
    found = dry_run(SCRIPT + TWICE)
    assert found.answer["ended"] == "finished", found.answer
    assert found.answer["steps"] == 4 * 2
    assert found.answer["files"] == 1


def test_a_loop_that_is_not_known_is_left_and_begins_no_training(
    dry_run: Callable[..., Any],
) -> None:
    found = dry_run(SCRIPT + LEFT)
    assert found.answer["ended"] == "left", found.answer
    assert found.answer["steps"] == 2
    assert found.answer["files"] == 0


def test_around_loops_that_are_ended_one_gets_no_more_batches(dry_run: Callable[..., Any]) -> None:
    found = dry_run(SCRIPT + EMPTIED)
    assert found.answer["ended"] == "finished", found.answer
    assert found.answer["steps"] == 2
    assert found.answer["files"] == 1


PASSES = "def fit(loss):\n    {}\n"
KINDS = {
    "a_backward_pass": (PASSES.format("loss.backward()"), True),
    "one_of_a_scaler": (PASSES.format("scaler.scale(loss).backward()"), True),
    "one_of_a_fabric": (PASSES.format("[fabric.backward(each) for each in loss]"), True),
    "gradients_that_go": (PASSES.format("loss.zero_grad()"), True),
    "epochs": ("import torch\n" + PASSES.format("train_one_epoch()"), True),
    "epochs_without_torch": (PASSES.format("train_one_epoch()"), False),
    "a_mode": ("import torch\n" + PASSES.format("return loss.training"), False),
    "a_function_of_autograd": ("class F:\n    def backward(self):\n        pass\n", False),
    "code_that_is_compiled": ("import numba\n" + PASSES.format("loss.backward()"), False),
    "none": ("import torch\n" + PASSES.format("return loss.sum()"), False),
}


@pytest.mark.parametrize("name", KINDS)
def test_modules_that_train_are_known_by_what_they_call(name: str) -> None:
    text, trains = KINDS[name]
    assert _trains(compile(text, name, "exec")) is trains


FAILING = """
def fit(numbers):
    for number in numbers:
        while number < 3:
            number += len(str(number))
        print(number)
    numbers[
        7
    ].backward()
"""


def test_a_library_that_fails_says_the_same(tmp_path: Path) -> None:
    package = tmp_path / "user" / "site-packages"
    package.mkdir(parents=True)
    (package / "failing.py").write_text(FAILING)
    (tmp_path / "user" / "script.py").write_text(
        "import sys\nsys.path.insert(0, 'site-packages')\nimport failing\nfailing.fit([1, 2])\n"
    )
    plain, ours = both(tmp_path, "script.py")
    assert ours == plain
    assert "line 7, in fit" in plain[2]


def test_an_item_is_kept_by_the_one_that_goes_over_it_alone() -> None:
    class Item:
        pass

    for item in Loops().each(Item() for _ in range(2)):
        known = weakref.ref(item)
        del item
        gc.collect()
        assert known() is None
