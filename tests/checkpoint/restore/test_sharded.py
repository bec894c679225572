"""Sharded runs are restored on the same number of ranks and on another, at the same bits.

``sharded_worker.py`` is one rank; a later phase reads what the ones before wrote.
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

WORKER = Path(__file__).with_name("sharded_worker.py")
PHASES = {"one": 1, "two": 2, "back": 1}


def _cases() -> list[tuple[str, str]]:
    functions = [n for n in ast.parse(WORKER.read_text()).body if isinstance(n, ast.FunctionDef)]
    return [
        (decorator.id, function.name)
        for function in functions
        for decorator in function.decorator_list
        if isinstance(decorator, ast.Name) and decorator.id in PHASES
    ]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    """What became of every case, by phase and rank."""
    from residency import sim

    sim.enable("1GiB")  # built before processes are timed
    folder = tmp_path_factory.mktemp("ranks")
    source = str(Path(residency.__file__).parents[1])
    found = {}
    for phase, num_ranks in PHASES.items():
        command = [sys.executable, str(WORKER)]
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(num_ranks), phase, str(folder)],
                env=os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(num_ranks)
        ]
        try:
            for process in processes:
                output = process.communicate(timeout=120)[0]
                assert process.returncode == 0, output
        finally:
            for process in processes:
                process.kill()
                process.wait()
        files = [folder / f"{phase}{rank}.json" for rank in range(num_ranks)]
        found[phase] = [json.loads(file.read_text()) for file in files]
    return found


@pytest.mark.parametrize(("phase", "case"), _cases())
def test_sharded_restores(outcomes: dict[str, list[dict[str, str]]], phase: str, case: str) -> None:
    for rank, of_rank in enumerate(outcomes[phase]):
        assert of_rank.get(case) == "passed", f"rank {rank}: {of_rank.get(case)}"
