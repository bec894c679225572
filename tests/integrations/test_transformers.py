"""The callback and the mixin with the installed Transformers, PEFT, TRL, accelerate, bitsandbytes.

They run where the simulator stands in CUDA's place, in processes of their own: one that has the
cases that ``transformers_worker.py`` imports, one for TRL, and two ranks.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import workers
from limits import WORKER_SECONDS

sys.path.insert(0, str(Path(__file__).parents[1] / "sim"))

from worker_cases import cases_of, judge, missing_devices

# One process runs all cases, before the first of them: minutes, on a busy machine many.
SECONDS = 700
pytestmark = [pytest.mark.whole, pytest.mark.timeout(2 * SECONDS + 100)]

HERE = Path(__file__).parent
SHARED = HERE.parent / "sim"  # has worker_cases
WORKERS = {"transformers_worker": 1, "trl_worker": 1, "transformers_ranks_worker": 2}
PACKAGES = {
    "transformers_worker": ("accelerate",),
    "trl_worker": ("trl", "peft", "datasets"),
    "transformers_ranks_worker": ("accelerate", "peft"),
}
CASES = [
    (worker, rank, case)
    for worker, num_ranks in WORKERS.items()
    for _, case in cases_of(HERE / f"{worker}.py", {"case", "two"})
    for rank in range(num_ranks)
]

Outcomes = dict[tuple[str, int], dict[str, str]]


def start(worker: str, *arguments: object) -> subprocess.Popen[str]:
    offline = {"HF_HUB_OFFLINE": "1"}
    return workers.start(HERE / f"{worker}.py", *arguments, folder=SHARED, variables=offline)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """What became of each case, by worker and rank, of the workers that can run here."""
    pytest.importorskip("transformers")
    folders = {worker: tmp_path_factory.mktemp(worker) for worker in WORKERS}
    here = [worker for worker in WORKERS if _obstacle(worker) is None]
    alone = [worker for worker in here if WORKERS[worker] == 1]
    workers.finish(*(start(worker, folders[worker]) for worker in alone), seconds=SECONDS)
    files = {(worker, 0): folders[worker] / "outcomes.json" for worker in alone}
    ranks = "transformers_ranks_worker"
    if ranks in here:
        both = [start(ranks, rank, 2, "two", folders[ranks]) for rank in range(2)]
        workers.finish(*both, seconds=SECONDS)
        files |= {(ranks, rank): folders[ranks] / f"two{rank}.json" for rank in range(2)}
    return {place: json.loads(file.read_text()) for place, file in files.items()}


def _obstacle(worker: str) -> str | None:
    """Says why a worker cannot run here."""
    absent = [name for name in PACKAGES[worker] if importlib.util.find_spec(name) is None]
    return f"skipped: needs {', '.join(absent)}" if absent else missing_devices(WORKERS[worker])


@pytest.mark.parametrize(("worker", "rank", "case"), CASES)
def test_with_transformers(outcomes: Outcomes, worker: str, rank: int, case: str) -> None:
    if (worker, rank) not in outcomes:
        judge(_obstacle(worker))
    judge(outcomes[worker, rank].get(case))


def test_without_transformers_the_error_gives_the_line_that_installs_it() -> None:
    code = """
import sys
sys.modules["transformers"] = None
try:
    import residency.integrations.transformers
except ImportError as error:
    assert "pip install 'residency[transformers]'" in str(error), error
else:
    raise SystemExit("it was imported")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=WORKER_SECONDS)
