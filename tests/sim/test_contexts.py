"""What a process does with an accelerator before it uses it, and what a context takes.

One worker, in which the simulator is CUDA, forks a child for each case.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import residency
from residency import sim

pytestmark = pytest.mark.sim

WORKER = Path(__file__).with_name("context_worker.py")
CASES = [
    line.removeprefix("def ").split("(")[0]
    for before, line in itertools.pairwise(WORKER.read_text().splitlines())
    if before == "@case"
]


@pytest.fixture(scope="module")
def outcomes(built: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("contexts")
    path = os.pathsep.join([str(Path(residency.__file__).parents[1]), os.getenv("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-W", "error", str(WORKER), str(folder)],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    outcomes: dict[str, str] = json.loads((folder / "outcomes.json").read_text())
    return outcomes


@pytest.mark.parametrize("case", CASES)
def test_contexts(outcomes: dict[str, str], case: str) -> None:
    assert outcomes[case] == "passed", outcomes[case]


@pytest.mark.parametrize("context", ["64MiB", "1GiB", 1 << 40])
def test_a_context_must_leave_room_on_the_device(context: int | str) -> None:
    with pytest.raises(residency.InvalidArgumentError, match="expected room for something beside"):
        sim.enable("64MiB", context=context)


@pytest.mark.parametrize("context", ["much", -1, "12 parsecs", 0.5])
def test_a_context_without_a_size_is_refused(context: object) -> None:
    with pytest.raises(residency.InvalidArgumentError, match="context is"):
        sim.enable("1GiB", context=context)
