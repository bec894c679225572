"""verl and Trinity-RFT, from the index, with what `residency.integrations.verl` offers them.

The face of CUDA is for good in a process, and an import of verl takes seconds, so few processes run
everything, at the same time: one rank, two ranks, and three that import verl as Ray's workers do.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from limits import WORKER_SECONDS

sys.path.insert(0, str(Path(__file__).parents[1] / "sim"))

from worker_cases import cases_of, run_phase

pytestmark = [pytest.mark.sim, pytest.mark.slow]

HERE = Path(__file__).parent
ONE, TWO = HERE / "verl_worker.py", HERE / "verl_ranks_worker.py"


@pytest.fixture(scope="session")
def started(
    built: None, variables: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Any]]]:
    """All processes, each of which a test waits for that asks what became of it."""

    def run(*arguments: object, **others: str) -> str:
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            env=variables | others,
            capture_output=True,
            text=True,
            timeout=WORKER_SECONDS,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    # Not in the threads below: the first call makes the folder of all, which two would make twice.
    folders = {name: tmp_path_factory.mktemp(name) for name in ("one", "two")}

    def of_one_rank() -> Any:
        folder = folders["one"]
        run(ONE, folder)
        return [json.loads((folder / "outcomes.json").read_text())]

    def of_two_ranks() -> Any:
        return run_phase(TWO, folders["two"], "in_two", 2)

    def imported(**others: str) -> Any:
        return json.loads(run(HERE / "import_worker.py", **others).splitlines()[-1])

    with ThreadPoolExecutor() as pool:
        yield {
            "one rank": pool.submit(of_one_rank),
            "two ranks": pool.submit(of_two_ranks),
            "plugin": pool.submit(imported),
            "no plugin": pool.submit(imported, VERL_USE_EXTERNAL_PLUGINS="none"),
            "bad size": pool.submit(imported, RESIDENCY_VERL_NEED="lots"),
        }


@pytest.mark.parametrize(
    ("which", "case"),
    [("one rank", case) for _, case in cases_of(ONE, {"case"})]
    + [("two ranks", case) for _, case in cases_of(TWO, {"in_two"})],
)
def test_with_the_frameworks_themselves(
    started: dict[str, Future[Any]], which: str, case: str
) -> None:
    for rank, outcomes in enumerate(started[which].result()):
        assert outcomes.get(case) == "passed", f"rank {rank}: {outcomes.get(case)}"


def test_importing_verl_loads_the_guard_and_nothing_heavy(
    started: dict[str, Future[Any]],
) -> None:
    found = started["plugin"].result()
    assert "residency.integrations.verl_plugin" in found["loaded"]
    heavy = ("_handoff", "_optim", "_transfer", "_device", "_memory._state", "integrations.verl")
    assert not {f"residency.{name}" for name in heavy} & set(found["loaded"])
    assert not found["are_workers_there"]
    assert found["guarded"] == 4
    assert found["messages"] == []


def test_without_plugins_verl_is_as_without_this_library(
    started: dict[str, Future[Any]],
) -> None:
    found = started["no plugin"].result()
    assert found["loaded"] == []
    assert found["guarded"] == 0


def test_a_size_that_does_not_parse_leaves_verl_as_it_is_and_says_so(
    started: dict[str, Future[Any]],
) -> None:
    found = started["bad size"].result()
    assert found["guarded"] == 0
    assert len(found["messages"]) == 1
    assert "RESIDENCY_VERL_NEED is 'lots'" in found["messages"][0]
