"""A run of a thousand steps with every transition in it, in random order, after which nothing has
grown: no memory, no descriptor, no thread, no work of a step.

``python long_run_program.py SEED FOLDER`` is one of them. It has a process of its own: what other
tests keep in memory, or let go meanwhile, is not in its figures.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from interruptions import count_lines

import residency
from residency import sim
from residency.testing import simulated_device_type

MIB = 1 << 20
NUM_ROUNDS = 4
STEPS = 250  # of a round: each has every action below equally often


class Run:
    """Trains a layer whose parameter is replaced now and then, and passes every transition."""

    def __init__(self, chance: random.Random, device: torch.device, folder: Path) -> None:
        self.device = device
        self.folder = folder
        self.model = nn.ParameterList(
            nn.Parameter(torch.zeros(shape, device=device)) for shape in ((40, 30), (700,), (9,))
        )
        name, more = chance.choice(
            [("AdamW", {}), ("SGD", {"momentum": 0.9}), ("Adagrad", {}), ("NAdam", {})]
        )
        self.optimizer: Any = getattr(torch.optim, name)(self.model.parameters(), lr=1e-2, **more)
        self.settings: dict[str, Any] = {
            "bucket": chance.choice(["2KiB", "16KiB"]),
            "resident": chance.choice(["0B", "64B", "8KiB"]),
            "slots": chance.randint(1, 3),
            "pin": chance.random() < 0.8,
        }
        self.log = f"{name} {self.settings}"
        residency.offload_optimizer(self.optimizer, **self.settings)
        self.checkpointer = residency.Checkpointer(folder / "saves", keep=2)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.checkpointer.save(0, self.state)  # for the first restore

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with residency.phase("step"):
            self.optimizer.step()

    def snapshot(self, count: int) -> None:
        taken = residency.snapshot(self.state)
        self.step()  # moves to other homes
        taken.wait()

    def save(self, count: int) -> None:
        self.checkpointer.save(count, self.state)

    def restore(self, count: int) -> None:
        self.checkpointer.restore(self.state)

    def park(self, count: int) -> None:
        residency.park(self.model)
        residency.unpark(self.model)

    def hand_over(self, count: int) -> None:
        need = residency.memory_state().capacity - 4 * MIB
        with residency.hand_off(need, park=[self.optimizer, self.model]):
            pass

    def load(self, count: int) -> None:
        self.optimizer.load_state_dict(self.optimizer.state_dict())

    def replace(self, count: int) -> None:
        """Puts a new parameter in the place of one, with its state, as a splatting run does."""
        old = self.model[1]
        new = nn.Parameter(old.detach().clone())
        self.optimizer.state[new] = dict(self.optimizer.state.pop(old))
        self.optimizer.param_groups[0]["params"][1] = new
        self.model[1] = new

    def switch(self, count: int) -> None:
        residency.onload_optimizer(self.optimizer)
        residency.offload_optimizer(self.optimizer, **self.settings)

    def refuse(self, count: int) -> None:
        with pytest.raises(residency.RefusedError):
            self.checkpointer.save(count, {**self.state, "odd": object()})

    def open_and_close(self, count: int) -> None:
        with residency.Checkpointer(self.folder / "others") as other:
            other.save(count, {"model": self.model})

    def actions(self, chance: random.Random) -> list[list[Callable[[int], None]]]:
        """Returns what follows each step of a round: in all rounds the same transitions, but for
        their order, and the same ones at the end.
        """
        kinds = [(25, self.snapshot), (12, self.save), (10, self.replace), (5, self.park)]
        kinds += [(5, self.refuse), (2, self.hand_over), (3, self.load), (2, self.restore)]
        kinds += [(1, self.switch), (1, self.open_and_close)]
        after: list[list[Callable[[int], None]]] = [[] for _ in range(STEPS)]
        for number, action in kinds:
            for step in chance.sample(range(5, STEPS), number):
                after[step].append(action)
        after[-1] += [self.save, self.switch]
        return after


def resident_bytes() -> int:
    """Returns this process's bytes in memory, after what the C library keeps free is given back."""
    ctypes.CDLL(None).malloc_trim(0)
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def pinned_bytes() -> int:
    """Returns the page-locked bytes in use, after what torch only keeps for reuse is given back."""
    torch.accelerator.empty_host_cache()
    if simulated_device_type() is None:
        return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))
    return sim.pinned_memory_stats()["pinned_bytes.current"]


def figures_of_now() -> dict[str, int]:
    """Returns what is to be the same after every round."""
    return {
        "device": torch.accelerator.memory_allocated(),
        "page-locked": pinned_bytes(),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "tensors": sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()),
    }


def check(run: Run, chance: random.Random) -> None:
    """Makes the rounds of a run, and compares its figures after each."""
    figures: list[dict[str, int]] = []
    lines: list[int] = []
    resident: list[int] = []
    for number in range(NUM_ROUNDS):
        for index, actions in enumerate(run.actions(chance)):
            run.step()
            for action in actions:
                action(number * STEPS + index + 1)
        run.checkpointer.wait()
        gc.collect()
        torch.accelerator.synchronize()
        lines.append(min(count_lines(run.step) for _ in range(3)))
        figures.append(figures_of_now())
        resident.append(resident_bytes())
    assert figures == [figures[0]] * NUM_ROUNDS, figures
    # A step's own lines stand for its time, which a busy machine would falsify.
    assert max(lines) <= 1.05 * min(lines), lines
    assert resident[-1] - resident[1] < 8 * MIB, resident


def main(seed: int, folder: Path) -> None:
    torch.set_num_threads(1)
    face = simulated_device_type()
    if face is not None:
        sim.enable("1GiB", device=face, schedule="late", workspaces=False, context="0B")
    device = torch.accelerator.current_accelerator()
    assert device is not None
    chance = random.Random(seed)
    run = Run(chance, device, folder)
    print(run.log)  # what a failure is read with
    with residency.record(folder / "run.jsonl"):
        check(run, chance)
    run.checkpointer.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
