"""Forms of trainers in installed packages, as templates: modules of a package by their names.

A trainer gets its numbers from the script. ``log`` is the script's own, and writes marks. ``STEP``
stands for what a round does with a batch, ``AFTER`` for what comes after each optimizer step,
``EPOCH`` for what comes at the end of an epoch, and ``END`` at the end of a training.
"""

from __future__ import annotations

BASE = '''"""What the trainers of this package share."""
import torch
from torch import nn
from torch.nn import functional as F

from .callbacks import CallbackList


class Base:
    def __init__(self, model, optimizer, log, *, accumulate=1, evaluation=(), callbacks=(),
                 evaluate_every=0, save_every=0, scaler=None):
        self.model, self.optimizer, self.log = model, optimizer, log
        self.accumulate, self.evaluation = accumulate, evaluation
        self.evaluate_every, self.save_every = evaluate_every, save_every
        self.callbacks = CallbackList(callbacks)
        self.step, self.epoch, self.seen, self.history = 0, 0, 0, []

    def loss(self, batch):
        x, y = (each.cuda() for each in batch)
        return F.mse_loss(self.model(x), y) / self.accumulate

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        for x, y in self.evaluation:
            self.model(x.cuda())
        self.model.train()
        self.log("evaluated", self.step)

    def save(self, path):
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                    "step": self.step}, path)
        self.log("saved", path)

    def load(self, path):
        checkpoint = torch.load(path, map_location="cuda")
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.log("loaded", checkpoint["step"])
'''

CALLBACKS = '''"""Callbacks."""


class Callback:
    def on_step_begin(self, trainer):
        pass

    def on_step_end(self, trainer):
        pass

    def on_epoch_end(self, trainer):
        pass

    def on_train_end(self, trainer):
        pass


class Printer(Callback):
    def on_step_end(self, trainer):
        trainer.log("callback", trainer.step)

    def on_train_end(self, trainer):
        trainer.log("callback at the end")


class Keeper(Callback):
    def on_epoch_end(self, trainer):
        trainer.save("epoch.pt")


class CallbackList(list):
    def call(self, name):
        for each in self:
            getattr(each, name)(self.trainer)
'''

# Optimizer steps in one function, as most trainers have them.
STEP = """
self.callbacks.call("on_step_begin")
loss = self.loss(batch)
BACKWARD
self.seen += 1
self.history.append(loss.item())
if self.seen % self.accumulate == 0:
    UPDATE
    self.step += 1
    self.log("step", self.step)
    self.callbacks.call("on_step_end")
    AFTER
"""

# Names of modules, and their lines; the trainer's call in a script is ``trainer.RUN``.
SHAPES: dict[str, tuple[dict[str, str], str]] = {
    "fit": ({"trainer": """
class Trainer(Base):
    def fit(self, loader, epochs):
        for self.epoch in range(epochs):
            for batch in loader:
                STEP
            EPOCH
        END
        return self.history
"""}, "fit(loader, @E@)"),
    "step method": ({"trainer": """
class Trainer(Base):
    def training_step(self, batch):
        STEP
        return loss.detach()

    def fit(self, loader, epochs):
        for epoch in range(1, epochs + 1):
            for i, batch in enumerate(loader):
                self.training_step(batch)
            EPOCH
        END
"""}, "fit(loader, epochs=@E@)"),
    "epoch method": ({"trainer": """
class Trainer(Base):
    def _run_epoch(self, loader):
        for batch in loader:
            self._run_batch(batch)
        EPOCH

    def _run_batch(self, batch):
        STEP

    def train(self, loader, max_epochs):
        while self.epoch < max_epochs:
            self._run_epoch(loader)
            self.epoch += 1
        END
"""}, "train(loader, @E@)"),
    "generator": ({"trainer": """
class Trainer(Base):
    def run_epoch(self, loader):
        for batch in loader:
            STEP
            yield loss.detach()

    def fit(self, loader, epochs):
        for epoch in range(epochs):
            for loss in self.run_epoch(loader):
                self.log("yielded")
            EPOCH
        END
"""}, "fit(loader, @E@)"),
    "steps": ({"trainer": """
class Trainer(Base):
    def train(self, loader, max_steps):
        while self.step < max_steps:
            for batch in loader:
                STEP
                if self.step >= max_steps:
                    break
            EPOCH
        END
"""}, "train(loader, @M@)"),
    "stream": ({"trainer": """
import itertools


class Trainer(Base):
    def train(self, loader, max_steps):
        batches = itertools.cycle(loader)
        while True:
            batch = next(batches)
            STEP
            if self.step == max_steps:
                break
        EPOCH
        END
"""}, "train(loader, @M@)"),
    "returns": ({"trainer": """
import itertools


class Trainer(Base):
    def _loop(self, loader, max_steps):
        for batch in itertools.cycle(loader):
            STEP
            if self.step == max_steps:
                return

    def train(self, loader, max_steps):
        self._loop(loader, max_steps)
        END
"""}, "train(loader, @M@)"),
    "accumulate": ({"trainer": """
import itertools


class Trainer(Base):
    def train(self, loader, max_steps):
        batches = itertools.cycle(loader)
        for step in range(max_steps):
            self.optimizer.zero_grad()
            for micro in range(self.accumulate):
                batch = next(batches)
                STEP
        EPOCH
        END
"""}, "train(loader, @M@)"),
    "function": ({"engine": """
def train_one_epoch(self, loader):
    for batch in loader:
        STEP
    return sum(self.history) / len(self.history)
""", "trainer": """
from .engine import train_one_epoch


class Trainer(Base):
    def fit(self, loader, epochs):
        for epoch in range(epochs):
            mean = train_one_epoch(self, loader)
            EPOCH
        END
"""}, "fit(loader, @E@)"),
    "far function": ({"engine": """
def train_epoch(self, loader):
    for batch in loader:
        STEP
""", "trainer": """
class Trainer(Base):
    def fit(self, loader, epochs):
        from . import engine
        for epoch in range(epochs):
            engine.train_epoch(self, loader)
            EPOCH
        END
"""}, "fit(loader, @E@)"),
    "loop object": ({"loops": """
class EpochLoop:
    def __init__(self, trainer):
        self.trainer = trainer

    def run(self, loader):
        self = self.trainer
        for batch in loader:
            STEP


class FitLoop:
    def __init__(self, trainer):
        self.trainer, self.inner = trainer, EpochLoop(trainer)

    def run(self, loader, epochs):
        inner, self = self.inner, self.trainer
        for epoch in range(epochs):
            inner.run(loader)
            EPOCH
""", "trainer": """
from .loops import FitLoop


class Trainer(Base):
    def fit(self, loader, epochs):
        FitLoop(self).run(loader, epochs)
        END
"""}, "fit(loader, @E@)"),
    "iterator": ({"trainer": """
class Steps:
    def __init__(self, trainer, loader):
        self.trainer, self.batches = trainer, iter(loader)

    def __iter__(self):
        return self

    def __next__(self):
        batch = next(self.batches)
        self = self.trainer
        STEP
        return self.step


class Trainer(Base):
    def fit(self, loader, epochs):
        for epoch in range(epochs):
            for step in Steps(self, loader):
                self.log("came", step)
            EPOCH
        END
"""}, "fit(loader, @E@)"),
    "context": ({"trainer": """
import contextlib


class Trainer(Base):
    @contextlib.contextmanager
    def accumulating(self, batch):
        self.batch = batch
        yield
        self.batch = None

    def fit(self, loader, epochs):
        try:
            for epoch in range(epochs):
                for batch in loader:
                    with self.accumulating(batch):
                        STEP
                EPOCH
        except KeyboardInterrupt:
            self.log("interrupted")
        finally:
            self.log("finally")
        END
"""}, "fit(loader, @E@)"),
    "iterate again": ({"trainer": """
class Trainer(Base):
    def train(self, loader, max_steps):
        batches = iter(loader)
        while self.step < max_steps:
            try:
                batch = next(batches)
            except StopIteration:
                batches = iter(loader)
                batch = next(batches)
            STEP
        END
"""}, "train(loader, @M@)"),
}  # fmt: skip

BACKWARDS = {
    "plain": "loss.backward()",
    "torch": "torch.autograd.backward(loss)",
    "strategy": "self.strategy.backward(loss)",
}

UPDATES = {
    "plain": "self.optimizer.step()\nself.optimizer.zero_grad()",
    "clipped": "nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)\nself.optimizer.step()\n"
    "self.optimizer.zero_grad(set_to_none=True)",
    "strategy": "self.strategy.update(self)",
    "model": "self.optimizer.step()\nself.model.zero_grad()",
}

STRATEGY = '''"""Where a training runs."""


class Strategy:
    def backward(self, loss):
        loss.backward()

    def update(self, trainer):
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
'''

HEAD = '''"""A training script."""
import os, sys
import torch, torch.nn as nn
from PACKAGE import Keeper, Printer, Trainer


open("marks.txt", "a").close()  # a dry run removes files made after a save


def mark(*words):
    with open("marks.txt", "a") as file:
        print(*words, file=file)


def data(count):
    dataset = torch.utils.data.TensorDataset(torch.randn(count * 4, 16), torch.randn(count * 4, 8))
    return torch.utils.data.DataLoader(dataset, batch_size=4)


class Batches:
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        for _ in range(self.count):
            yield torch.randn(4, 16), torch.randn(4, 8)

'''
