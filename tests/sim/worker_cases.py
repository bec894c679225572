"""The cases that worker processes run, and what starts them; a test reads what became of each."""

from __future__ import annotations

import ast
import gc
import importlib
import json
import os
import threading
import traceback
from collections.abc import Callable, Container
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from residency import sim
from residency.testing import simulated_device_type, tested_device_type

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet

Case = Callable[[], None]
_SKIPPED = "skipped: "


def on_thread(call: Callable[[], object]) -> None:
    """Calls on a new thread, for which nobody has chosen a device, and raises what that raises."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result()


class OwnAttention(torch.nn.Module):
    """One head's attention of each position to all of its sample."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        head = value[:, None]  # [batch, 1, length, width]
        return torch.nn.functional.scaled_dot_product_attention(head, head, head)[:, 0]


def draw(device: str) -> list[torch.Tensor]:
    """Drops numbers and weights of attention, which a backward pass draws again."""
    functional = torch.nn.functional
    heads = torch.ones(1, 2, 16, 16, device=device, requires_grad=True)
    output = functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5)
    weights = torch.rand(output.shape, device=device)
    return [functional.dropout(weights, 0.5), *torch.autograd.grad(output, heads, weights)]


class Cases:
    """Collects functions as a decorator, and runs them in their order."""

    def __init__(self) -> None:
        self._functions: dict[str, Case] = {}

    def __call__(self, function: Case) -> Case:
        self._functions[function.__name__] = function
        return function

    def run(self, file: Path) -> None:
        """Writes ``{name: "passed" or the traceback}`` after every case."""
        outcomes = {}
        gc.collect()
        gc.freeze()  # what is imported: the collection after a case need not pass by it
        for name, function in self._functions.items():
            try:
                function()
                outcomes[name] = "passed"
            except pytest.skip.Exception as skipped:
                outcomes[name] = f"{_SKIPPED}{skipped}"
            except (Exception, pytest.fail.Exception):
                outcomes[name] = traceback.format_exc()
            file.write_text(json.dumps(outcomes))
            gc.collect()
            torch.accelerator.synchronize()


def judge(outcome: str | None) -> None:
    """Ends a test as its case ended."""
    if outcome is not None and outcome.startswith(_SKIPPED):
        pytest.skip(outcome.removeprefix(_SKIPPED))
    assert outcome == "passed", outcome


def take_device(capacity: int | str, *, face: str | None = None, **settings: Any) -> torch.device:
    """Takes the real accelerator where tests run on one, else the simulated one with settings.

    Args:
        capacity: Of the simulated one.
        face: As which device it appears; else as the one that the tests run on.
        settings: Further ones of ``sim.enable``.
    """
    simulated = simulated_device_type()
    if simulated is None:
        return torch.device(tested_device_type(), 0)
    return sim.enable(capacity, device=face or simulated, **settings)


def require_simulator(why: str) -> None:
    """Skips a case on a real device."""
    if simulated_device_type() is None:
        pytest.skip(why)


def missing_devices(num_ranks: int) -> str | None:
    """Says why so many ranks cannot run here: of real devices, each needs one of its own."""
    if simulated_device_type() is None and (found := torch.accelerator.device_count()) < num_ranks:
        return f"{_SKIPPED}{num_ranks} ranks need {num_ranks} devices; there are {found}"
    return None


def pinned_bytes(*, with_cached: bool = False) -> int:
    """Returns the page-locked bytes that tensors hold, or those that freed blocks keep as well."""
    if simulated_device_type() is None:
        key = "allocated_bytes.current" if with_cached else "active_bytes.current"
        return int(torch.cuda.host_memory_stats().get(key, 0))
    return sim.pinned_memory_stats()[f"{'pinned' if with_cached else 'used'}_bytes.current"]


def optional(name: str) -> Any:
    """Imports a package that a machine may lack; the cases that use it are skipped there."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return _Absent(name)


class _Absent:
    """Stands for a package that is not installed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        pytest.skip(f"needs {self._name}")


def allocated_peak(function: Callable[[], object]) -> int:
    """Returns by how much a call raised the device's allocated bytes at most."""
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    function()
    torch.accelerator.synchronize()
    return torch.accelerator.max_memory_allocated() - before


class GatedWriter(dcp.FileSystemWriter):
    """Writes nothing until it may: the steps that follow an asynchronous save come first."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.may_write = threading.Event()

    def write_data(self, plan: Any, planner: Any) -> Any:
        assert self.may_write.wait(60)
        return super().write_data(plan, planner)


def cases_of(worker: Path, phases: Container[str]) -> list[tuple[str, str]]:
    """Returns phase and name of each case of a worker: the functions, decorated with the phase, of
    its file and of the files ``*_cases.py`` beside it that it imports.
    """
    nodes = list(ast.parse(worker.read_text()).body)
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    for name in names:
        if name.endswith("_cases"):
            nodes += ast.parse(worker.with_name(f"{name}.py").read_text()).body
    return [
        (decorator.id, function.name)
        for function in nodes
        if isinstance(function, ast.FunctionDef)
        for decorator in function.decorator_list
        if isinstance(decorator, ast.Name) and decorator.id in phases
    ]


class Phases:
    """The phases of a worker, each of which runs, after those that it needs, once it is asked for.

    Args:
        worker: The file.
        folder: Where a phase finds what those before it wrote.
        num_ranks: The processes of each phase.
        needs: The phases whose files a phase reads.
        killed: The ranks that a phase kills.
    """

    def __init__(
        self,
        worker: Path,
        folder: Path,
        num_ranks: dict[str, int],
        *,
        needs: dict[str, tuple[str, ...]],
        killed: dict[str, tuple[int, ...]] | None = None,
    ) -> None:
        self._worker = worker
        self._folder = folder
        self._num_ranks = num_ranks
        self._needs = needs
        self._killed = killed or {}
        self._outcomes: dict[str, list[dict[str, str]]] = {}

    def __getitem__(self, phase: str) -> list[dict[str, str]]:
        """Returns what became of every case, for each rank but those that are killed."""
        if phase not in self._outcomes:
            for other in self._needs.get(phase, ()):
                self[other]
            self._outcomes[phase] = run_phase(
                self._worker,
                self._folder,
                phase,
                self._num_ranks[phase],
                killed=self._killed.get(phase, ()),
            )
        return self._outcomes[phase]


def parameters_of(
    worker: Path, phases: Container[str], *, whole: Container[str]
) -> list[ParameterSet]:
    """Returns a worker's phases and cases as parameters; those of some phases are in the second
    tier.
    """
    return [
        pytest.param(phase, case, marks=[pytest.mark.whole] if phase in whole else [])
        for phase, case in cases_of(worker, phases)
    ]


def run_cases(worker: Path, folder: Path, *packages: str) -> dict[str, str]:
    """Runs the phase "case" of a worker whose processes find this file and the worker's folder.

    Args:
        worker: The file.
        folder: Where it writes.
        packages: What it imports; where one is missing, the tests are skipped.

    Returns:
        What became of every case.
    """
    for package in packages:
        pytest.importorskip(package)
    with pytest.MonkeyPatch.context() as patch:
        for each in (worker.parent, Path(__file__).parent):
            patch.setenv("PYTHONPATH", str(each), prepend=os.pathsep)
        return run_phase(worker, folder, "case", 1)[0]


def run_phase(
    worker: Path, folder: Path, phase: str, num_ranks: int, *, killed: Container[int] = ()
) -> list[dict[str, str]]:
    """Runs a worker's phase, one process for each rank.

    Returns:
        What became of every case, for each rank but those that are killed.
    """
    from ranks import run_ranks  # tests find it, and the workers that import this file do not

    scripts = [[worker, rank, num_ranks, phase, folder] for rank in range(num_ranks)]
    run_ranks(scripts, folder, killed=killed)
    files = [folder / f"{phase}{rank}.json" for rank in range(num_ranks) if rank not in killed]
    return [json.loads(file.read_text()) for file in files]
