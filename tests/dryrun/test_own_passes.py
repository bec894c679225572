"""Loaders with an ``__iter__`` of their own, as timm and Ultralytics have them: one iterator for
all epochs, whose batches a generator asks for with ``next``.
"""

from collections.abc import Callable
from typing import Any

REPEATED = """
import torch
from torch.utils.data import DataLoader

class Forever:
    def __init__(self, sampler):
        self.sampler = sampler

    def __len__(self):
        return len(self.sampler)

    def __iter__(self):
        while True:
            yield from self.sampler

class Repeated(DataLoader):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        object.__setattr__(self, "batch_sampler", Forever(self.batch_sampler))
        self.batches = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.batches)

# The loops of a library, which a script's are not: they end with their data alone.
exec(compile('''
def fit(loader, step, evaluate):
    for epoch in range(3):
        for batch in loader:
            step(batch.cuda())
        evaluate()
''', "<library>", "exec"))

model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step(batch):
    model(batch).sum().backward()
    optimizer.step()
"""
TRAINING = (
    REPEATED
    + """
def evaluate():
    with torch.no_grad():
        for batch in Repeated(torch.ones(4, 4), batch_size=2):
            model(batch.cuda())

fit(Repeated(torch.ones(40, 4), batch_size=2), step, evaluate)
torch.save(model.state_dict(), "model.pt")
"""
)
EVALUATED = (
    REPEATED
    + """
def evaluate():
    with torch.no_grad():
        counts.append(len([model(batch.cuda()) for batch in held_out]))

held_out = Repeated(torch.ones(200, 4), batch_size=2)
counts = []
fit(Repeated(torch.ones(4, 4), batch_size=2), step, lambda: None)
for _ in range(3):
    evaluate()
assert counts[1:] == [1, 1] and 1 < counts[0] < 100, counts
"""
)
BROKEN = (
    REPEATED
    + """
class Short(Repeated):
    def __iter__(self):
        yield next(iter(()))

for batch in Short(torch.ones(4, 4), batch_size=2):
    pass
"""
)


STOPPED = """
import os, sys, torch

os.makedirs("site-packages/ultralytics/engine")
with open("site-packages/ultralytics/engine/trainer.py", "w") as file:
    file.write('''
class BaseTrainer:
    def train(self, model, loader):
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.stop = False
        for epoch in range(100):
            losses = []
            for batch in loader:
                model(batch.cuda()).sum().backward()
                self.optimizer_step()
                losses.append(1.0)
                if self.stop:
                    break
            self.average = sum(losses) / len(losses)
            if self.stop:
                break

    def optimizer_step(self):
        self.optimizer.step()

import torch
''')
sys.path.insert(0, "site-packages")
from ultralytics.engine.trainer import BaseTrainer

model = torch.nn.Linear(4, 4).cuda()
BaseTrainer().train(model, torch.utils.data.DataLoader(torch.ones(40, 4), batch_size=2))
torch.save(model.state_dict(), "model.pt")
"""


def test_an_epoch_of_such_a_loader_ends_and_what_comes_after_it_runs(
    dry_run: Callable[..., Any],
) -> None:
    found = dry_run(TRAINING)
    assert found.answer["ended"] == "finished", found.errors
    assert found.answer["steps"] == 2
    assert found.answer["files"] == 1
    assert found.phase("evaluate")["peak_allocated"]


def test_each_pass_of_an_evaluation_has_a_batch(dry_run: Callable[..., Any]) -> None:
    found = dry_run(EVALUATED)
    assert found.answer["ended"] == "finished", found.errors


def test_a_trainer_of_ultralytics_is_asked_to_stop(dry_run: Callable[..., Any]) -> None:
    found = dry_run(STOPPED)
    assert found.answer["ended"] == "finished", found.errors
    assert found.answer["steps"] == 2
    assert found.answer["files"] == 1


def test_a_generator_that_fails_before_the_end_fails_as_ever(dry_run: Callable[..., Any]) -> None:
    found = dry_run(BROKEN)
    assert found.status == 3
    assert "generator raised StopIteration" in found.answer["error"]
