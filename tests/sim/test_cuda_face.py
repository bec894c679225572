"""The simulated accelerator in CUDA's place: scripts that say ``cuda`` run, and compute the same.

The face is for good in a process, so each test starts some; five workers run most cases, those of
frameworks, of graphs, of recorded histories and of refusals apart. Three of them are in the second
tier.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from workers import finish, start

import residency
from residency import sim
from residency_sim._cuda import _face

sys.path.insert(0, str(Path(__file__).parent))

import cuda_strict_worker
from worker_cases import cases_of

pytestmark = pytest.mark.sim

HERE = Path(__file__).parent
FIRST = ("cuda_face_worker", "cuda_strict_worker")
SECOND = (
    "cuda_frameworks_worker",
    "cuda_graphs_worker",
    "cuda_history_worker",
    "cuda_masks_worker",
)
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


Outcomes = Callable[[str], dict[str, str]]


@pytest.fixture(scope="module")
def outcomes(built: None, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Returns what became of a worker's cases."""
    # Frameworks warn their users of this and that while they are imported.
    flags = {"cuda_frameworks_worker": ["-W", "default"]}

    @functools.cache
    def of(worker: str) -> dict[str, str]:
        folder = tmp_path_factory.mktemp(worker)
        finish(start("-W", "error", *flags.get(worker, []), HERE / f"{worker}.py", folder))
        outcomes: dict[str, str] = json.loads((folder / "outcomes.json").read_text())
        return outcomes

    return of


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
        processes.append(
            start("-W", "error", "-c", RUN_ON.format(device=device, arguments=arguments))
        )
    assert finish(*processes) == ["", ""]
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
version = torch.version.cuda
nccl = torch.distributed.is_nccl_available()
try:
    sim.enable("1GiB", device="cuda", share="0123", schedule="soon")
except ValueError:
    pass
assert not torch.cuda.is_available()
is_available, torch.cuda.is_available = torch.cuda.is_available, lambda: True
try:
    sim.enable("1GiB", device="cuda")
except sim.SimulatorError as error:
    assert "CUDA_VISIBLE_DEVICES" in str(error)
else:
    raise AssertionError
torch.cuda.is_available = is_available
assert torch.accelerator.current_accelerator(check_available=True) is None
assert torch.version.cuda == version
assert torch.distributed.is_nccl_available() == nccl
assert sim.enable("1GiB").type == "sim"  # nothing was decided
""",
        )
    )
