"""The case "resume": a checkpoint of ``torch.distributed.checkpoint`` is loaded to train on.

The recipe in torch's tutorials, ``get_state_dict`` and ``set_state_dict``, has a fresh optimizer
make its whole state on the device, with gradients of zeros, before anything is read. The capacity
is what the same run, uninterrupted and offloaded, reserves at most. In that, torch's own recipe
does not get to its first step; `TrainState` does, and ends at the bits of the run without a break.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful

from residency import OffloadedOptimizer, memory_state, offload_optimizer
from residency._demo._corpus import read_corpus, training_batch
from residency._demo._frame import CaseRun, FrameMaker, Words
from residency._demo._model import count_parameters, make_model, on_host, train_on
from residency._demo._report import Promise, Report
from residency._demo._settings import MIDDLING, Settings
from residency._units import MIB, format_bytes

WORDS = Words(
    snippet="""\
from residency.integrations.dcp import TrainState
state = TrainState(model, residency.offload_optimizer(optimizer), scheduler=scheduler)
dcp.load({"app": state}, checkpoint_id=path)""",
    fits="resumes where torch's recipe does not",
    same="ends as the run without a break",
    fails="runs out of memory in the {phase} {step}",
)
_NUM_STEPS = 6
_MIDDLE = _NUM_STEPS // 2  # the last step before the checkpoint
_NUM_ROWS, _NUM_COLUMNS = 1, 32  # few, so that the states weigh more than the activations
_BUCKET_BYTES = MIB

_StateMaker = Callable[[torch.nn.Module, torch.optim.Optimizer], Any]


class _Recipe(Stateful):
    """The recipe of torch's tutorials."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )


def run(make_frame: FrameMaker, settings: Settings) -> Report:
    """Trains without a break, then resumes with torch's recipe and with ours under a capacity."""
    frame = make_frame(WORDS, _NUM_STEPS)
    with tempfile.TemporaryDirectory() as folder:
        train = partial(_train, seed=settings.seed, folder=folder, begins=_MIDDLE + 1)
        reference = frame.run("uninterrupted", partial(train, make_state=_offloaded, begins=1))
        capacity_bytes = reference.found["reserved"]
        recipe = partial(train, make_state=_Recipe)
        free = frame.run("set_state_dict, no limit", recipe)
        frame.run("set_state_dict", recipe, capacity_bytes)
        ours = frame.run("TrainState", partial(train, make_state=_offloaded), capacity_bytes)
    num_parameters = count_parameters(MIDDLING)
    load_bytes = ours.found.get("load")
    return frame.report(
        reference,
        "all parameters, optimizer states, group values and losses are equal bit for bit",
        {
            "model": f"Qwen3 architecture, {num_parameters:,} parameters in fp32 = "
            f"{format_bytes(4 * num_parameters)}, AdamW, offloaded in all runs once it has a state",
            "steps": f"{_NUM_STEPS}, a DCP checkpoint after {_MIDDLE}",
            "capacity": "what the uninterrupted run reserves at most = "
            f"{format_bytes(capacity_bytes)}",
        },
        Promise(
            "the load takes at most a bucket of device memory",
            load_bytes is not None and load_bytes <= _BUCKET_BYTES,
            f"{format_bytes(load_bytes or 0)} <= {format_bytes(_BUCKET_BYTES)}; torch's "
            f"recipe takes {free.found['load'] / (4 * num_parameters):.1f} x the parameters",
        ),
    )


def _offloaded(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Returns what saves, and loads, by the names that torch's recipe has."""
    from residency.integrations.dcp import TrainState

    return TrainState(model, offload_optimizer(optimizer, bucket=_BUCKET_BYTES, slots=2))


def _train(run: CaseRun, seed: int, folder: str, begins: int, make_state: _StateMaker) -> None:
    """Trains all steps with a save midway, or those from ``begins`` on after a load."""
    run.enter("load")
    corpus = read_corpus()
    model = make_model(MIDDLING, seed=seed).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parts = {"app": make_state(model, optimizer)}
    if begins > 1:
        run.phase = "load of the checkpoint"
        run.found["load"] = run.growth_of(lambda: load(parts, checkpoint_id=folder))
    if not isinstance(optimizer, OffloadedOptimizer):
        offload_optimizer(optimizer, bucket=_BUCKET_BYTES, slots=2)
    for step in range(begins, _NUM_STEPS + 1):
        run.enter("step", step)
        batch = training_batch(corpus, seed=seed, step=step, rows=_NUM_ROWS, columns=_NUM_COLUMNS)
        train_on(model, optimizer, batch.to(run.device), run.losses)
        if begins == 1 and step == _MIDDLE:
            save(parts, checkpoint_id=folder)
    run.found["reserved"] = memory_state(run.device).peak_reserved
    run.computed = {
        "losses": run.losses[-_MIDDLE:],
        "parameters": on_host(dict(model.named_parameters())),
        "optimizer": on_host(optimizer.state_dict()),
    }
