"""A run of two thousand steps with every transition in it, after which nothing has grown."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from interruptions import count_lines
from torch import nn

import residency
from residency._units import parse_bytes

NUM_STEPS = 2000
ROUND = 500  # every action below falls into each round equally often


class Run:
    """Trains a layer whose parameter is replaced now and then, and passes every transition."""

    def __init__(self, device: torch.device, folder: Path) -> None:
        self.device = device
        self.model = nn.ParameterList(
            nn.Parameter(torch.zeros(shape, device=device)) for shape in ((40, 30), (700,), (9,))
        )
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        residency.offload_optimizer(self.optimizer, bucket="2KiB", resident="64B")
        self.checkpointer = residency.Checkpointer(folder / "saves", keep=2)
        self.state = {"model": self.model, "optimizer": self.optimizer}

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
        need = residency.memory_state().capacity - parse_bytes("4MiB")
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
        residency.offload_optimizer(self.optimizer, bucket="2KiB", resident="64B")

    def refuse(self, count: int) -> None:
        with pytest.raises(residency.RefusedError):
            self.checkpointer.save(count, {**self.state, "odd": object()})

    def open_and_close(self, count: int) -> None:
        with residency.Checkpointer(self.checkpointer.steps and self._second) as other:
            other.save(count, {"model": self.model})

    @property
    def _second(self) -> Path:
        return Path(str(self.checkpointer._directory.path) + "-2")

    def actions(self) -> Iterator[tuple[int, Callable[[int], None]]]:
        """Yields how often, in steps, each transition comes."""
        yield 10, self.snapshot
        yield 20, self.save
        yield 25, self.replace
        yield 50, self.park
        yield 50, self.refuse
        yield 250, self.hand_over
        yield 100, self.load
        yield 125, self.restore
        yield 250, self.switch
        yield 250, self.open_and_close


def resident_bytes() -> int:
    """Returns this process's bytes in memory, after what the C library keeps free is given back."""
    ctypes.CDLL(None).malloc_trim(0)
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def recorded(folder: Path) -> Iterator[None]:
    with residency.record(folder / "run.jsonl"):
        yield


@pytest.mark.sim_device(schedule="late")
def test_two_thousand_steps_with_every_transition_leave_nothing_behind(
    device: torch.device, tmp_path: Path, pinned_bytes: Callable[[], int]
) -> None:
    run = Run(device, tmp_path)
    figures: list[dict[str, int]] = []
    lines: list[int] = []
    resident: list[int] = []
    with recorded(tmp_path):
        for count in range(1, NUM_STEPS + 1):
            run.step()
            for every, action in run.actions():
                if count % every == 0:
                    action(count)
            if count % ROUND == 0:
                run.checkpointer.wait()
                gc.collect()
                torch.accelerator.synchronize()
                lines.append(count_lines(run.step))
                figures.append(
                    {
                        "device": torch.accelerator.memory_allocated(),
                        "page-locked": pinned_bytes(),
                        "files": len(os.listdir("/proc/self/fd")),
                        "threads": threading.active_count(),
                        "tensors": sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()),
                    }
                )
                resident.append(resident_bytes())
    run.checkpointer.close()
    for what, first in figures[0].items():
        assert [each[what] for each in figures] == [first] * len(figures), what
    # A step's own lines stand for its time, which a busy machine would falsify.
    assert max(lines) <= 1.05 * min(lines)
    assert resident[-1] - resident[1] < parse_bytes("8MiB")
