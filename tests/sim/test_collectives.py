"""Collectives between two processes: gloo's results, NCCL's order, and what is built on them.

``collectives_worker.py`` is one rank; it runs all cases, so that a schedule costs one start.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from ranks import run_ranks

pytestmark = [pytest.mark.sim, pytest.mark.whole]

WORKER = Path(__file__).with_name("collectives_worker.py")
RANKS = 2


def _cases(decorator: str) -> list[str]:
    lines = itertools.pairwise(WORKER.read_text().splitlines())
    found = [line for before, line in lines if before == decorator]
    return [line.removeprefix("def ").split("(")[0] for line in found]


Outcomes = list[dict[str, str]]


def _outcomes(folder: Path, settings: str, num_ranks: int) -> Outcomes:
    more = [*settings.split(), num_ranks, folder]
    run_ranks([[WORKER, rank, *more] for rank in range(num_ranks)], folder)
    files = [folder / f"outcomes{rank}.json" for rank in range(num_ranks)]
    return [json.loads(file.read_text()) for file in files]


def _check(outcomes: Outcomes, case: str) -> None:
    for rank, of_rank in enumerate(outcomes):
        assert of_rank.get(case) == "passed", f"rank {rank}: {of_rank.get(case)}"


@pytest.fixture(scope="module", params=["late sim", "overtake sim", "late cuda"])
def of_two(
    built: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Outcomes:
    return _outcomes(tmp_path_factory.mktemp("ranks"), request.param, 2)


@pytest.mark.parametrize("case", _cases("@case"))
def test_two_ranks(of_two: Outcomes, case: str) -> None:
    _check(of_two, case)


@pytest.fixture(scope="module", params=["late sim", "overtake sim"])
def of_four(
    built: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Outcomes:
    return _outcomes(tmp_path_factory.mktemp("ranks"), request.param, 4)


@pytest.mark.parametrize("case", _cases("@case_of_four"))
def test_four_ranks(of_four: Outcomes, case: str) -> None:
    _check(of_four, case)


@pytest.mark.parametrize(
    ("device", "backend"), [("sim", "'simccl'"), ("sim", ""), ("cuda", "'nccl'")]
)
@pytest.mark.parametrize("end", ["dist.destroy_process_group()", "pass"])
def test_group_of_the_device_alone_ends_cleanly(
    built: None, tmp_path: Path, device: str, backend: str, end: str
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
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 1, device="{device}"))
model(tensor).sum().backward()  # asks the group for its default backend
dist.all_reduce(tensor, async_op=True)
{end}
"""
    )
    run_ranks([[script, rank, tmp_path] for rank in range(RANKS)], tmp_path)
