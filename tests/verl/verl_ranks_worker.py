"""Ranks of verl's worker, a process each, whose guards wait for each other.

Run as ``verl_ranks_worker.py RANK NUM_RANKS PHASE FOLDER`` by tests/verl/test_verl.py.
"""

from __future__ import annotations

import gc
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "sim"))
import verl_lab as lab
from worker_cases import Cases

import residency
from residency._handoff import _reclaim

in_two = Cases()
RANK = int(sys.argv[1])
LENGTHS = (64, 128)


def model() -> Path:
    return Path(sys.argv[4]) / f"model{RANK}"


@contextmanager
def noting(notes: list[str], *calls: tuple[Any, str]) -> Iterator[None]:
    """Notes the names of functions as they are called; they do what they did."""

    def spy(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            notes.append(name)
            return function(*args, **kwargs)

        return noted

    with ExitStack() as stack:
        for owner, name in calls:
            stack.enter_context(mock.patch.object(owner, name, spy(name, getattr(owner, name))))
        yield


@in_two
def a_transition_drops_collects_gives_back_and_then_waits_for_the_other_rank() -> None:
    from torch.distributed.fsdp import FSDPModule
    from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

    notes: list[str] = []
    kept: list[weakref.ref[Any]] = []

    class Box:
        def __init__(self) -> None:
            self.tensor = torch.ones(1 << 22, device="cuda")
            self.me = self

    class Careless(TrainingWorker):
        def train_mini_batch(self, data: Any) -> Any:
            output = super().train_mini_batch(data)
            for parameter in self.engine.module.parameters():
                parameter.grad = torch.zeros_like(parameter)
            kept.append(weakref.ref(Box()))
            notes.clear()
            return output

    class CarelessWorker(ActorRolloutRefWorker):
        actor_worker_cls = Careless

    worker = lab.make_worker(lab.config_of(model(), *lab.OFFLOADED), CarelessWorker)
    calls = [
        (torch.optim.Optimizer, "zero_grad"),
        (FSDPModule, "reshard"),
        (gc, "collect"),
        (torch.accelerator, "empty_cache"),
        (dist, "all_gather"),
    ]
    gc.disable()
    try:
        # A search that takes too long on a busy machine finds nothing, and nothing is collected.
        with (
            mock.patch.object(_reclaim, "_SEARCH_SECONDS", 600.0),
            lab.guard(),
            noting(notes, *calls),
        ):
            lab.update(worker, 64)
            notes.append("wake")
    finally:
        gc.enable()
    assert kept[0]() is None
    assert all(p.grad is None for p in worker.actor.engine.module.parameters())
    free, total = torch.cuda.mem_get_info()
    assert free == total - torch.cuda.memory_reserved()
    in_order = [name for name, after in zip(notes, [*notes[1:], ""], strict=True) if name != after]
    assert in_order[:2] == ["zero_grad", "reshard"], in_order
    assert in_order[-4:] == ["collect", "empty_cache", "all_gather", "wake"], in_order


@in_two
def two_ranks_end_at_the_bits_of_stock_training() -> None:
    gathered = "ref.fsdp_config.reshard_after_forward=False"
    stock = lab.make_worker(lab.config_of(model(), *lab.PLAIN, gathered))
    lab.train(stock, LENGTHS)
    with lab.guard():
        ours = lab.make_worker(lab.config_of(model(), *lab.OFFLOADED, gathered))
        lab.train(ours, LENGTHS)
    assert lab.sums_of(ours) == lab.sums_of(stock)


@in_two
def a_rank_without_the_bytes_is_an_error_on_both() -> None:
    worker = lab.make_worker(lab.config_of(model(), *lab.OFFLOADED))
    need, message = ("1MiB", "rank 1 failed") if RANK == 0 else ("1023MiB", "too few")
    with lab.guard(need), pytest.raises(residency.HandOffError, match=message):
        lab.update(worker, 64)
    with lab.guard("1MiB"):  # and the ranks are still in step
        lab.update(worker, 64)


def main(num_ranks: int, phase: str, folder: Path) -> None:
    from residency import sim

    sim.enable("1GiB", check_races=True, context="0B", device="cuda")
    warnings.simplefilter("ignore")  # the frameworks' advice to their users
    lab.become_rank(RANK, num_ranks, folder / "meeting_of_ranks")
    model().mkdir()
    lab.save_model(model())
    in_two.run(folder / f"{phase}{RANK}.json")


if __name__ == "__main__":
    main(int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
