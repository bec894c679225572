"""Collectives between two processes: gloo's results, NCCL's order, and what is built on them.

``collectives_worker.py`` is one rank; it runs all cases, so that a schedule costs one start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from residency import sim

pytestmark = pytest.mark.sim

WORKER = Path(__file__).with_name("collectives_worker.py")
RANKS = 2
CASES = [
    line.removeprefix("def ").split("(")[0]
    for before, line in zip(
        WORKER.read_text().splitlines(), WORKER.read_text().splitlines()[1:], strict=False
    )
    if before == "@case"
]
Outcomes = list[dict[str, str]]


def _run_ranks(folder: Path, *arguments: str) -> list[str]:
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    source = str(Path(sim.__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join([source, environment.get("PYTHONPATH", "")])
    ranks = [
        subprocess.Popen(
            [sys.executable, *arguments[:1], str(rank), *arguments[1:], str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    outputs = []
    try:
        for process in ranks:
            outputs.append(process.communicate(timeout=120)[0])
            assert process.returncode == 0, outputs[-1]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return outputs


@pytest.fixture(scope="module", params=["late sim", "overtake sim", "late cuda"])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    sim.enable("1GiB")  # builds the extension if need be: the ranks' time limit is for the cases
    folder = tmp_path_factory.mktemp("ranks")
    _run_ranks(folder, str(WORKER), *request.param.split())
    return [json.loads((folder / f"outcomes{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(outcomes: Outcomes, case: str) -> None:
    for rank in range(RANKS):
        assert outcomes[rank].get(case) == "passed", f"rank {rank}: {outcomes[rank].get(case)}"


@pytest.mark.parametrize(
    ("device", "backend"), [("sim", "'simccl'"), ("sim", ""), ("cuda", "'nccl'")]
)
@pytest.mark.parametrize("end", ["dist.destroy_process_group()", "pass"])
def test_group_of_the_device_alone_ends_cleanly(
    tmp_path: Path, device: str, backend: str, end: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import sys
import torch
import torch.distributed as dist
from residency import sim

sim.enable("1GiB", check_races=True, device="{device}")
store = dist.FileStore(sys.argv[2] + "/store", {RANKS})
dist.init_process_group({backend or None}, store=store, rank=int(sys.argv[1]), world_size={RANKS})
tensor = torch.ones(5, device="{device}")
dist.all_reduce(tensor)
dist.barrier()
assert tensor.tolist() == [2.0] * 5
dist.all_reduce(tensor, async_op=True)
{end}
"""
    )
    _run_ranks(tmp_path, str(script))
