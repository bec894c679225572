"""Writes random training scripts whose loops end in many ways, and says what each of them prints.

A script writes marks: of each step, of each round, of each epoch, and of all that comes after. What
it should print in a dry run is what the same script prints whose data ends: ``Script.text`` writes
it with the numbers of epochs, batches and steps that make as many optimizer steps as were asked
for, by plain arithmetic, and ``printed`` runs that one with stock torch on the CPU.
"""

from __future__ import annotations

import contextlib
import random
import re
import warnings
from pathlib import Path

from tests.torture.dry_run_loop_trainings import ALL, Training, inside
from training_programs import some

HEAD = '''"""A training script."""
import contextlib, itertools, os, queue, sys, threading
from types import SimpleNamespace
import torch, torch.nn as nn, torch.nn.functional as F
from tqdm import tqdm


open("marks.txt", "a").close()  # a dry run removes files made after a save


def mark(*words):
    with open("marks.txt", "a") as file:
        print(*words, file=file)


class Ahead:
    def __init__(self, loader):
        self.batches = iter(loader)
        self.load()

    def load(self):
        try:
            self.batch = next(self.batches)
        except StopIteration:
            self.batch = None

    def next(self):
        batch = self.batch
        self.load()
        return batch


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield torch.randn(8), torch.randn(2)


def infinite(loader):
    while True:
        for batch in loader:
            yield batch


def moved(loader):
    for x, y in loader:
        yield x.cuda(), y.cuda()


def from_a_thread(loader):
    batches = queue.Queue(2)

    def put():
        for batch in loader:
            batches.put(batch)
        batches.put(None)

    threading.Thread(target=put, daemon=True).start()
    while (batch := batches.get()) is not None:
        yield batch


def evaluate(model, loader):
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for x, y in loader:
            total += F.mse_loss(model(x.cuda()), y.cuda()).item()
            count += 1
    model.train()
    return total / count


def data(count):
    dataset = torch.utils.data.TensorDataset(torch.randn(count * 4, 8), torch.randn(count * 4, 2))
    return torch.utils.data.DataLoader(dataset, batch_size=4)


run = SimpleNamespace(steps=0)
held_out = data(3)
'''

MORE = ["", "", "", "", "", "fine-tune", "same optimizer", "twice", "folds", "fold function",
        "sweep", "optimizers first"]  # fmt: skip
EXITS = ["", "", "", "sys.exit(0)", "exit()", "raise SystemExit"]


class Script:
    """A random script, and what it prints where its data ends after as many steps."""

    def __init__(self, chance: random.Random) -> None:
        self.steps = chance.choice([2, 2, 2, 2, 1, 3])
        self.more = chance.choice(MORE)
        bare = self.more == ""
        self.trainings = [Training(chance, "a", self.steps, bare)]
        if self.more in ("fine-tune", "same optimizer", "optimizers first"):
            self.trainings += [Training(chance, "b", self.steps, bare)]
        if self.more == "same optimizer" and self.trainings[0].frame == "optimizers":
            self.more = "fine-tune"  # it makes them as it goes
        self.in_main = chance.choice(["", "main", "guarded", "exit"])
        self.exit = chance.choice(EXITS)
        self.as_module = some(chance, 0.15)
        self.after = {each for each in ("evaluate", "save", "resume", "sizes") if some(chance, 0.4)}
        self.lenient = {"same optimizer": "b", "optimizers first": "ab"}.get(self.more, "")
        if self.more == "same optimizer":
            first, second = self.trainings
            second.kind, second.every = first.kind, first.every
            second.count(first.critics)
            second.extras = second.extras - {"schedule"} | first.extras & {"schedule"}
        self._text = self._written()

    def text(self, *, full: bool) -> str:
        """Returns the script as it stands, or with the numbers of a dry run."""
        counts = {
            each.name + key: pair for each in self.trainings for key, pair in each.counts.items()
        }
        return re.sub("@(..)@", lambda found: str(counts[found[1]][0 if full else 1]), self._text)

    def _written(self) -> str:
        first, *others = self.trainings
        definitions, lines = first.written()
        body = [*first.set_up(), *lines, 'mark("trained")']
        if self.more == "twice":
            body += [*first.set_up(model=False), *lines, 'mark("trained again")']
        for second in others:
            more, again = second.written()
            definitions += more
            if self.more == "optimizers first":
                body = [*second.set_up(), f"kept = {ALL}", *first.set_up(model=False), *lines,
                        'mark("trained")', f"{ALL} = kept", *again]  # fmt: skip
            elif self.more == "fine-tune":
                body += [*second.set_up(model=False), *again]
            else:
                body += ["loader = data(@bN@)", *again]
            body += ['mark("trained again")']
        if self.more == "folds":
            body = ["for fold in range(3):", *inside([*body, 'mark("fold", fold)'])]
        if self.more in ("fold function", "sweep"):
            body += ["return evaluate(model, held_out)"]
            definitions += ["def run_fold(fold):", *inside(body)]
            body = ["for fold in range(3):", "    score = run_fold(fold)", '    mark("fold", fold)']
            if self.more == "sweep":
                body = ["scores = [run_fold(rate) for rate in (0.1, 0.01)]", "best = max(scores)"]
        else:
            body += self._after()
        body += ['mark("finished")']
        if self.in_main:
            definitions += ["def main():", *inside(body)]
            call = {"main": "main()", "guarded": "    main()", "exit": "    sys.exit(main())"}
            body = ['if __name__ == "__main__":'] * (self.in_main != "main")
            body += [call[self.in_main]]
        return "\n".join([HEAD, *definitions, *body, self.exit]) + "\n"

    def _after(self) -> list[str]:
        lines = []
        if "evaluate" in self.after:
            lines += ["score = evaluate(model, held_out)", 'mark("evaluated")']
        if "save" in self.after:
            lines += ['torch.save(model.state_dict(), "final.pt")', 'mark("saved")']
            if "resume" in self.after:
                lines += ['model.load_state_dict(torch.load("final.pt"))', 'mark("resumed")']
        if "sizes" in self.after:
            lines += ["for key, value in model.state_dict().items():",
                      '    mark("size", key, tuple(value.shape))']  # fmt: skip
        return lines


def marks(folder: Path) -> list[str]:
    """Returns what a script has printed, and leaves none of it."""
    file = folder / "marks.txt"
    lines = file.read_text().splitlines() if file.exists() else []
    file.unlink(missing_ok=True)
    return lines


def printed(script: str, folder: Path) -> list[str]:
    """Runs a script on the CPU, where each loss is 1 as in a dry run, and returns its marks."""
    script = script.replace('"cuda"', '"cpu"').replace(".cuda()", "")
    script = script.replace(".item()", ".item() * 0 + 1.0")
    with contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(SystemExit):
            exec(compile(script, "train.py", "exec"), {"__name__": "__main__"})
    return marks(folder)


def kinds(lines: list[str], lenient: str) -> list[str]:
    """Leaves of the trainings that may be longer or shorter only what kinds of marks they make, and
    nothing of those that some numbers of steps alone bring.
    """
    seen: dict[str, None] = {}
    kept = []
    for line in lines:
        if line[0] not in lenient or line[1] != " ":
            kept.append(line)
        elif line.split()[1] in ("checked", "saved"):
            pass
        elif (kind := " ".join(line.split()[:2])) not in seen:
            seen[kind] = None
            kept.append(kind)
    return kept
