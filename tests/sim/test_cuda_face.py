"""The simulated accelerator in CUDA's place: scripts that say ``cuda`` run, and compute the same.

The face is for good in a process, so each test starts some; five workers run most cases, those of
frameworks, of graphs, of recorded histories and of refusals apart. Three of them are in the second
tier.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from limits import WORKER_SECONDS

import residency
from residency import sim
from residency.sim._cuda import _face

sys.path.insert(0, str(Path(__file__).parent))

import cuda_strict_worker
from worker_cases import cases_of

pytestmark = pytest.mark.sim

HERE = Path(__file__).parent
FIRST = ("cuda_face_worker", "cuda_strict_worker")
SECOND = ("cuda_frameworks_worker", "cuda_graphs_worker", "cuda_history_worker")
CASES = [
    (worker, case)
    for worker in (*FIRST, *SECOND)
    for _, case in cases_of(HERE / f"{worker}.py", {"case"})
]
CASES += [
    ("cuda_strict_worker", name)
    for name in cuda_strict_worker.REFUSED | cuda_strict_worker.ACCEPTED
]
RUN_ON = """
import runpy, sys
if {device!r} != "cpu":
    from residency import sim
    sim.enable("1GiB", check_races=True, device={device!r})
sys.argv = {arguments!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def start(*arguments: object, variables: dict[str, str] | None = None) -> subprocess.Popen[str]:
    source = str(Path(sim.__file__).parents[2])
    path = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | (variables or {})
    return subprocess.Popen(
        [sys.executable, "-W", "error", *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    with process:
        try:
            output = process.communicate(timeout=WORKER_SECONDS)[0]
        finally:
            process.kill()
    assert process.returncode == 0, output
    return output


Outcomes = Callable[[str], dict[str, str]]


@pytest.fixture(scope="module")
def outcomes(built: None, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Returns what became of a worker's cases; the workers of its tier run at one time."""
    done: dict[str, dict[str, str]] = {}

    def of(worker: str) -> dict[str, str]:
        if worker not in done:
            done.update(run_workers(FIRST if worker in FIRST else SECOND, tmp_path_factory))
        return done[worker]

    return of


def run_workers(
    workers: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, str]]:
    folders = {worker: tmp_path_factory.mktemp(worker) for worker in workers}
    # Frameworks warn their users of this and that while they are imported.
    flags = {"cuda_frameworks_worker": ["-W", "default"]}
    processes = [
        start(*flags.get(worker, []), HERE / f"{worker}.py", folder)
        for worker, folder in folders.items()
    ]
    for process in processes:
        finish(process)
    return {
        worker: json.loads((folder / "outcomes.json").read_text())
        for worker, folder in folders.items()
    }


@pytest.mark.parametrize(
    ("worker", "case"),
    [
        pytest.param(worker, case, marks=[pytest.mark.whole] if worker in SECOND else [])
        for worker, case in CASES
    ],
)
def test_in_the_place_of_cuda(outcomes: Outcomes, worker: str, case: str) -> None:
    assert outcomes(worker).get(case) == "passed", outcomes(worker).get(case)


@pytest.mark.parametrize(
    ("precision", "other"),
    [
        pytest.param("float32", "cpu", id="float32 as the host's kernels compute it"),
        pytest.param(
            "bfloat16", "sim", id="autocast as on the device sim", marks=pytest.mark.whole
        ),
    ],
)
def test_a_script_computes_the_same_bits_on_cuda(
    built: None, tmp_path: Path, precision: str, other: str
) -> None:
    files, processes = [], []
    for device in ("cuda", other):
        files.append(tmp_path / f"{device}.pt")
        arguments = [str(HERE / "cuda_script.py"), device, precision, str(files[-1])]
        processes.append(start("-c", RUN_ON.format(device=device, arguments=arguments)))
    outputs = [finish(process) for process in processes]
    assert outputs == ["", ""]
    ours, others = (torch.load(file) for file in files)
    assert ours.keys() == others.keys()
    for name, value in ours.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(others[name])), name


def test_an_unknown_device_is_refused_with_the_known_ones() -> None:
    for device in ("", "cuda:0", "xpu", 0):
        with pytest.raises(residency.InvalidArgumentError, match="one of 'sim', 'cuda'"):
            sim.enable(device=device)  # type: ignore[arg-type]


def test_a_process_has_one_face() -> None:
    sim.enable(device="sim")
    with pytest.raises(sim.SimulatorError, match="is 'sim' in this process"):
        sim.enable(device="cuda")
    assert not torch.cuda.is_available()


@pytest.mark.parametrize(
    ("question", "message"),
    [("is_initialized", "has been used"), ("is_available", "CUDA_VISIBLE_DEVICES=")],
)
def test_a_cuda_that_is_there_is_not_replaced(
    monkeypatch: pytest.MonkeyPatch, question: str, message: str
) -> None:
    monkeypatch.setattr(torch.cuda, question, lambda: True)
    with pytest.raises(sim.SimulatorError, match=message):
        _face.check_free()


def test_a_refused_first_call_leaves_torch_without_cuda(built: None) -> None:
    finish(
        start(
            "-c",
            """
import torch
from residency import sim
try:
    sim.enable("1GiB", device="cuda", share="0123", schedule="soon")
except ValueError:
    pass
assert not torch.cuda.is_available()
torch.cuda.is_available = lambda: True
try:
    sim.enable("1GiB", device="cuda")
except sim.SimulatorError as error:
    assert "CUDA_VISIBLE_DEVICES" in str(error)
else:
    raise AssertionError
assert torch.accelerator.current_accelerator() is None
assert torch.version.cuda is None
assert not torch.distributed.is_nccl_available()
assert sim.enable("1GiB").type == "sim"  # nothing was decided
""",
        )
    )
