"""What the runs of all projects share: peaks, pictures of a training state, the interrupted run.

A driver is a process for itself: ``python -m benchmarks.projects.run_NAME KIND FOLDER``. It writes
``FOLDER/KIND.json``, and ``FOLDER/KIND.pt`` for the kinds that are compared with it.
"""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.projects.rows import (
    AGAINST_PLAIN,
    AGAINST_PLAIN_SAVED,
    BEFORE,
    HELD,
    LOAD,
    LOADED,
    LOADED_AGAINST_SAVED,
    LOSSES,
    LOSSES_AFTER,
    RATES,
    RESUMED,
    SAVE,
    STEPS,
    STEPS_AFTER,
)
from residency import sim

Picture = Mapping[str, Tensor]

NUM_STEPS = 3  # before the save, and after it
BUCKET = "1MiB"


class Training(Protocol):
    """A model with its optimizer and schedule, in the hands of a project's own code."""

    def train(self, steps: range) -> list[float]:
        """Takes steps, each with the batch of its number, and returns their losses."""

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...

    def picture(self) -> Picture:
        """Returns copies of parameters and optimizer state on the host, by name."""

    def rates(self) -> list[float]: ...


def enable(capacity: str = "2GiB") -> None:
    """Puts the simulated accelerator in CUDA's place."""
    sim.enable(capacity, device="cuda", schedule="late")
    torch.set_num_threads(1)


def meet(folder: Path, name: str, *, rank: int = 0, num_ranks: int = 1) -> None:
    """Begins the process group of one run, which no other one has met in."""
    store = dist.FileStore(str(folder / f"store-{name}"), num_ranks)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=num_ranks)


def local_copy(value: Tensor) -> Tensor:
    """Returns this rank's part of a tensor, copied to the host."""
    part: Tensor = value.to_local() if hasattr(value, "to_local") else value
    return part.detach().cpu().clone()


def differing(found: Picture, expected: Picture) -> list[int]:
    """Returns how many tensors differ in a bit, or are in one picture only, and of how many."""
    names = {*found, *expected}
    same = [n for n in names & {*found} & {*expected} if torch.equal(found[n], expected[n])]
    return [len(names) - len(same), len(names)]


class Peaks:
    """Peaks of allocated device memory, each since the one before, and what is held.

    Attributes:
        figures: Bytes, by what was done.
    """

    def __init__(self) -> None:
        self.figures: dict[str, int] = {}
        self.reset()

    def reset(self) -> None:
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()

    def note(self, what: str) -> None:
        torch.accelerator.synchronize()
        self.figures[what] = torch.accelerator.max_memory_allocated()
        torch.accelerator.reset_peak_memory_stats()

    def note_held(self, what: str) -> None:
        torch.accelerator.synchronize()
        self.figures[what] = torch.accelerator.memory_allocated()


def interrupted(make: Callable[[bool], Training], folder: Path, kind: str) -> dict[str, Any]:
    """Trains six steps with a save after three, then the last three from the save once more.

    Args:
        make: Makes a training; its argument says whether it is the fresh one that is to resume.
        folder: For the save, and for the pictures of other kinds.
        kind: Its name; ``plain`` is what the others are compared with.

    Returns:
        Figures in bytes, losses, rates, and numbers of tensors that differ.
    """
    saved = folder / f"save-{kind}"
    shutil.rmtree(saved, ignore_errors=True)
    first, last = range(NUM_STEPS), range(NUM_STEPS, 2 * NUM_STEPS)
    run, peaks = make(False), Peaks()
    losses = run.train(first)
    peaks.note(STEPS)
    peaks.note_held(HELD)
    run.save(saved)
    peaks.note(SAVE)
    rates, at_save = run.rates(), run.picture()
    losses += run.train(last)
    at_end = run.picture()
    del run
    _clear()
    run = make(True)
    peaks.note_held(BEFORE)
    peaks.reset()
    run.load(saved)
    peaks.note(LOAD)
    peaks.note_held(LOADED)
    loaded, loaded_rates = run.picture(), run.rates()
    resumed_losses = run.train(last)
    peaks.note(STEPS_AFTER)
    differ = {
        LOADED_AGAINST_SAVED: differing(loaded, at_save),
        RESUMED: differing(run.picture(), at_end),
    }
    if kind == "plain":
        torch.save([at_save, at_end], folder / "plain.pt")
    else:
        plain = torch.load(folder / "plain.pt")
        differ[AGAINST_PLAIN_SAVED] = differing(at_save, plain[0])
        differ[AGAINST_PLAIN] = differing(at_end, plain[1])
    return {
        "figures": peaks.figures,
        LOSSES: losses,
        LOSSES_AFTER: resumed_losses,
        RATES: [rates, loaded_rates],
        "differ": differ,
    }


def write(folder: Path, kind: str, result: Mapping[str, Any], stood_in: Sequence[str]) -> None:
    """Writes what a process found."""
    text = json.dumps({**result, "stand-ins": sorted(stood_in)}, indent=1)
    (folder / f"{kind}.json").write_text(text)


def _clear() -> None:
    gc.collect()
    torch.accelerator.empty_cache()
