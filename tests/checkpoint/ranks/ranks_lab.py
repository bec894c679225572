"""What the cases of ranks_worker.py share: runs to save, their pictures, who speaks to others.

The models are those of the optimizers' workers.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distributed_lab import (
    NUM_RANKS,
    Run,
    assert_same,
    sharded,
    whole_vectors,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from worker_cases import Cases

import residency
from residency._checkpoint._disk._publish import CheckpointDirectory
from residency._transfer import lending

PHASE, FOLDER = sys.argv[3], Path(sys.argv[4])
cases = {name: Cases() for name in ("one", "two", "waiting", "four", "dying", "after")}
one, two, waiting, four, dying, after = cases.values()
ACROSS = ((True, False), (False, True))  # from an offloaded run to a plain one, and back
BOTH_WAYS = ((False, False), (True, True), *ACROSS)


# ------------------------------------------------------------------------------- what cases share


def state_of(run: Run) -> dict[str, Any]:
    return {"model": run.model, "optimizer": run.optimizer, "scheduler": run.scheduler}


def picture(run: Run) -> dict[str, Any]:
    """Returns copies of all that this rank has: parameters, states, groups and counters."""
    found: dict[str, Any] = {"scheduler": repr(run.scheduler.state_dict())}
    for index, parameter in enumerate(run.parameters):
        found[f"{index}"] = local(parameter)
        for key, value in run.optimizer.state.get(parameter, {}).items():
            found[f"{index}.{key}"] = local(value) if isinstance(value, Tensor) else value
    for name, buffer in run.model.named_buffers():
        found[name] = local(buffer)
    return found


def local(value: Tensor) -> Tensor:
    value = value.to_local() if isinstance(value, DTensor) else value
    return value.detach().cpu().clone()


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert found[name].dtype == value.dtype, name
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


def scrambled(make_model: Callable[[], nn.Module], *, offload: bool, steps: int = 0) -> Run:
    """A run of other values, which a restore must all replace."""
    run = Run(make_model, offload=offload)
    run.train(range(50, 50 + steps))
    with torch.no_grad():
        for tensor in (*run.model.parameters(), *run.model.buffers()):
            tensor.add_(3)
    return run


def saved_while_training(
    make_model: Callable[[], nn.Module], name: str, ways: tuple[tuple[bool, bool], ...] = BOTH_WAYS
) -> None:
    """Saves a run on its way and restores each save, {plain, offloaded} both ways.

    The run ends at the bits of one that nobody saved, and so do the resumed ones.
    """
    undisturbed = Run(make_model, offload=False)
    undisturbed.train(range(4))
    for saver, reader in ways:
        folder = FOLDER / f"{name}-{NUM_RANKS}-{saver}-{reader}"
        run = Run(make_model, offload=saver)
        expected = {}
        with residency.Checkpointer(folder) as checkpointer:
            for step in range(4):
                if step in (1, 3):
                    expected[step] = picture(run)
                    before = torch.accelerator.memory_allocated()
                    torch.accelerator.reset_peak_memory_stats()
                    checkpointer.save(step, state_of(run))
                    assert torch.accelerator.max_memory_allocated() == before
                run.train([step])
        assert_same(run, undisturbed)
        assert not lending
        resumed = scrambled(make_model, offload=reader, steps=2 * saver)
        with residency.Checkpointer(folder) as checkpointer:
            assert checkpointer.restore(state_of(resumed), step=1) == 1
            assert_equal(picture(resumed), expected[1])
            assert checkpointer.restore(state_of(resumed)) == 3
        assert_equal(picture(resumed), expected[3])
        resumed.train(range(3, 4))
        assert_same(resumed, undisturbed)


def wide() -> nn.Module:
    return sharded(make_layers=whole_vectors)


class Threads:
    """Remembers which threads called a function of torch.distributed, once it watches them."""

    def __init__(self) -> None:
        self.callers: dict[str, set[str]] = {}
        self.savers: set[str] = set()

    def watch(self) -> None:
        save = CheckpointDirectory.save

        def note_and_save(*args: Any, **kwargs: Any) -> Any:
            self.savers.add(threading.current_thread().name)
            return save(*args, **kwargs)

        CheckpointDirectory.save = note_and_save  # type: ignore[method-assign]
        for name in ("all_reduce", "all_gather_object", "broadcast_object_list", "barrier"):
            setattr(dist, name, self._noting(name, getattr(dist, name)))
        for name in ("allreduce", "allgather", "broadcast", "barrier", "_allgather_base", "gather"):
            kind = dist.ProcessGroup
            setattr(kind, name, self._noting(f"group.{name}", getattr(kind, name)))

    def _noting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.callers.setdefault(name, set()).add(threading.current_thread().name)
            return function(*args, **kwargs)

        return call


threads = Threads()


def published_files(folder: Path, step: int) -> set[str]:
    return {path.name for path in (folder / f"step-{step:08d}").iterdir()}
