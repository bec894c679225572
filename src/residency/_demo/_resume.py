"""The case "resume": a checkpoint of ``torch.distributed.checkpoint`` is loaded to train on.

The recipe in torch's tutorials, ``get_state_dict`` and ``set_state_dict``, has a fresh optimizer
make its whole state on the device, with gradients of zeros, before anything is read. The capacity
is what the same run, uninterrupted and offloaded, reserves at most. In that, torch's own recipe
does not get to its first step; `TrainState` does, and ends at the bits of the run without a break.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful

from residency import OffloadedOptimizer, _device, memory_state, offload_optimizer
from residency._demo._bench import Bench
from residency._demo._corpus import Corpus, read_corpus, training_batch
from residency._demo._identity import different_values
from residency._demo._names import RESUME as NAME
from residency._demo._progress import Show
from residency._demo._report import LimitedRun, Promise, Report
from residency._demo._settings import ModelShape, Settings
from residency._demo._training import asked_bytes, make_model, to_host
from residency._units import MIB, format_bytes

SNIPPET = """\
from residency.integrations.dcp import TrainState
state = TrainState(model, residency.offload_optimizer(optimizer), scheduler=scheduler)
dcp.load({"app": state}, checkpoint_id=path)"""

_NUM_STEPS = 6  # half of them before the checkpoint
_SHAPE = ModelShape(
    num_layers=6,
    hidden_size=256,
    intermediate_size=768,
    num_attention_heads=4,
    num_key_value_heads=2,
)
_NUM_ROWS, _NUM_COLUMNS = 1, 32  # few, so that the states weigh more than the activations
_BUCKET_BYTES = MIB
_LABELS = ("uninterrupted", "set_state_dict, no limit", "set_state_dict", "TrainState")
_LOAD = "load of the checkpoint"


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


@dataclass(kw_only=True)
class _ResumedRun(LimitedRun):
    """The figures of one run."""

    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    state_dict: dict[str, Any] = field(default_factory=dict)
    reserved_bytes: int = 0
    load_bytes: int | None = None


def run_resume(bench: Bench, settings: Settings, show: Show) -> Report:
    """Trains without a break, then resumes with torch's recipe and with ours under a capacity."""
    corpus = read_corpus()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP says that it runs on one process

        def run(label: str, capacity_bytes: int | None, resume: _Resume | None) -> _ResumedRun:
            bench.limit(capacity_bytes)
            show(label, "load", 0, _NUM_STEPS)
            try:
                job = _HalvedRun(bench.device, settings, corpus, Path(folder), resume)
                done = job.run(lambda step: show(label, "step", step, _NUM_STEPS))
            finally:
                bench.settle()
            if done.phase is None:
                show(label, "eval", _NUM_STEPS, _NUM_STEPS)
            return done

        reference = run(_LABELS[0], None, None)
        capacity_bytes = reference.reserved_bytes
        free = run(_LABELS[1], None, _Recipe)
        stock = run(_LABELS[2], capacity_bytes, _Recipe)
        ours = run(_LABELS[3], capacity_bytes, _resumed)
    different = different_values(_computed(reference), _computed(ours))
    num_parameters = sum(value.numel() for value in reference.parameters.values())
    return Report(
        case=NAME,
        device=bench.describe(),
        facts={
            "model": f"Qwen3 architecture, {num_parameters:,} parameters in fp32 = "
            f"{format_bytes(4 * num_parameters)}, AdamW, offloaded in all runs once it has a state",
            "steps": f"{_NUM_STEPS}, a DCP checkpoint after {_NUM_STEPS // 2}",
            "capacity": "what the uninterrupted run reserves at most = "
            f"{format_bytes(capacity_bytes)}",
        },
        rows=(
            reference.row(NAME, _LABELS[0], None, None),
            free.row(NAME, _LABELS[1], None, None),
            stock.row(NAME, _LABELS[2], capacity_bytes, None),
            ours.row(NAME, _LABELS[3], capacity_bytes, not different),
        ),
        promises=_promises(free, stock, ours, different, 4 * num_parameters),
        snippet=SNIPPET,
    )


def _resumed(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> object:
    offload_optimizer(optimizer, bucket=_BUCKET_BYTES, slots=2)
    return _state(model, optimizer)


def _state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> object:
    """Returns what saves, and loads, by the names that torch's recipe has."""
    from residency.integrations.dcp import TrainState

    return TrainState(model, optimizer)


_Resume = Callable[[torch.nn.Module, torch.optim.Optimizer], Any]


class _HalvedRun:
    """One run: all steps with a save midway, or the second half after a load."""

    def __init__(
        self,
        device: torch.device,
        settings: Settings,
        corpus: Corpus,
        folder: Path,
        resume: _Resume | None,
    ) -> None:
        self._device, self._settings, self._corpus = device, settings, corpus
        self._folder, self._resume = folder, resume
        self._run = _ResumedRun()

    def run(self, advance: Callable[[int], None]) -> _ResumedRun:
        """Runs it; running out of memory is an outcome."""
        started = time.perf_counter()
        _device.reset_peak()
        try:
            self._go(advance)
            self._run.phase = self._run.step = None
        except torch.OutOfMemoryError as error:
            self._run.asked_bytes = asked_bytes(str(error))
            error.__traceback__ = None  # its frames hold the model
        self._run.peak_bytes = max(self._run.peak_bytes, _device.max_memory_allocated())
        self._run.reserved_bytes = memory_state(self._device).peak_reserved
        self._run.seconds = time.perf_counter() - started
        return self._run

    def _go(self, advance: Callable[[int], None]) -> None:
        run, settings = self._run, self._settings
        model = make_model(_SHAPE, seed=settings.seed, num_columns=_NUM_COLUMNS)
        model.to(self._device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        middle = _NUM_STEPS // 2
        if self._resume is not None:
            self._load(self._resume(model, optimizer))
        if not isinstance(optimizer, OffloadedOptimizer):
            offload_optimizer(optimizer, bucket=_BUCKET_BYTES, slots=2)
        for step in range(1 if self._resume is None else middle + 1, _NUM_STEPS + 1):
            advance(step)
            run.phase, run.step = "step", step
            self._step(model, optimizer, step)
            if self._resume is None and step == middle:
                save({"app": _state(model, optimizer)}, checkpoint_id=self._folder)
        run.parameters = {name: value.detach().cpu() for name, value in model.named_parameters()}
        run.state_dict = to_host(optimizer.state_dict())

    def _step(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        settings = self._settings
        batch = training_batch(
            self._corpus,
            seed=settings.seed,
            step=step,
            rows=_NUM_ROWS,
            columns=_NUM_COLUMNS,
        ).to(self._device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        self._run.losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def _load(self, state: object) -> None:
        self._run.phase = _LOAD
        before = _device.memory_allocated()
        load({"app": state}, checkpoint_id=self._folder)
        self._run.load_bytes = _device.max_memory_allocated() - before


def _computed(run: _ResumedRun) -> dict[str, object]:
    return {
        "losses": run.losses[-(_NUM_STEPS // 2) :],
        "parameters": run.parameters,
        "optimizer": run.state_dict,
    }


def _promises(
    free: _ResumedRun,
    stock: _ResumedRun,
    ours: _ResumedRun,
    different: list[str],
    parameter_bytes: int,
) -> tuple[Promise, ...]:
    same = "all parameters, optimizer states, group values and losses are equal bit for bit"
    if different:
        same = f"{len(different)} values differ, the first is {different[0]}"
    return (
        Promise(
            "resumes where torch's recipe does not",
            stock.phase is not None and ours.phase is None,
            f"stock {_ending(stock)}; ours {_ending(ours)}",
        ),
        Promise("ends as the run without a break", not different, same),
        Promise(
            "the load takes at most a bucket of device memory",
            ours.load_bytes is not None and ours.load_bytes <= _BUCKET_BYTES,
            f"{format_bytes(ours.load_bytes or 0)} <= {format_bytes(_BUCKET_BYTES)}; torch's "
            f"recipe takes {(free.load_bytes or 0) / parameter_bytes:.1f} x the parameters",
        ),
    )


def _ending(run: _ResumedRun) -> str:
    if run.phase is None:
        return "finishes"
    where = run.phase if run.step is None else f"{run.phase} {run.step}"
    return f"runs out of memory in the {where}"
