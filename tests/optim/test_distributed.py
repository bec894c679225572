"""Optimizers of sharded parameters: FSDP2, HSDP, tensor parallelism, and their checkpoints.

``distributed_worker.py`` is one rank; it runs all cases of a phase, so that a phase costs one
start. A later phase reads the checkpoints of the ones before.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import residency

pytestmark = pytest.mark.sim

WORKER = Path(__file__).with_name("distributed_worker.py")
PHASES = {"first": 1, "second": 2, "last": 1, "four": 4}


def _cases() -> list[tuple[str, str]]:
    functions = [n for n in ast.parse(WORKER.read_text()).body if isinstance(n, ast.FunctionDef)]
    return [
        (decorator.id, function.name)
        for function in functions
        for decorator in function.decorator_list
        if isinstance(decorator, ast.Name) and decorator.id in PHASES
    ]


def _run_phase(folder: Path, phase: str) -> list[dict[str, str]]:
    source = str(Path(residency.__file__).parents[1])
    path = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])
    ranks = range(PHASES[phase])
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(PHASES[phase]), phase, str(folder)],
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ranks
    ]
    try:
        for process in processes:
            output = process.communicate(timeout=120)[0]
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads((folder / f"{phase}{rank}.json").read_text()) for rank in ranks]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    """What became of every case, by phase and rank; the simulator is built already."""
    from residency import sim

    sim.enable("1GiB")
    folder = tmp_path_factory.mktemp("ranks")
    return {phase: _run_phase(folder, phase) for phase in PHASES}


@pytest.mark.parametrize(("phase", "case"), _cases())
def test_sharded_optimizers(
    outcomes: dict[str, list[dict[str, str]]], phase: str, case: str
) -> None:
    for rank, of_rank in enumerate(outcomes[phase]):
        assert of_rank.get(case) == "passed", f"rank {rank}: {of_rank.get(case)}"
