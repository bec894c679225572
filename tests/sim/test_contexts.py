"""What a process does with an accelerator before it uses it, and what a context takes.

Two workers, in which the simulator is CUDA, fork a child for each case.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from workers import finish, start

import residency
from residency import sim

pytestmark = pytest.mark.sim

WORKERS = [Path(__file__).with_name(f"{name}_worker.py") for name in ("context", "devices")]
CASES = [
    line.removeprefix("def ").split("(")[0]
    for worker in WORKERS
    for before, line in itertools.pairwise(worker.read_text().splitlines())
    if before == "@case"
]


@pytest.fixture(scope="module")
def outcomes(built: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    outcomes: dict[str, str] = {}
    for worker in WORKERS:
        folder = tmp_path_factory.mktemp(worker.stem)
        finish(start("-W", "error", worker, folder))
        outcomes |= json.loads((folder / "outcomes.json").read_text())
    return outcomes


@pytest.mark.whole
@pytest.mark.parametrize("case", CASES)
def test_contexts(outcomes: dict[str, str], case: str) -> None:
    assert outcomes[case] == "passed", outcomes[case]


@pytest.mark.parametrize("devices", [0, 9, -1, True, 1.0, "2"])
def test_a_number_of_devices_that_is_not_modelled_is_refused(devices: object) -> None:
    with pytest.raises(residency.InvalidArgumentError, match="expected 1 to 8"):
        sim.enable("1GiB", devices=devices)


def test_several_devices_are_cudas() -> None:
    with pytest.raises(residency.InvalidArgumentError, match="modelled as 'cuda' alone"):
        sim.enable("1GiB", devices=2)


@pytest.mark.parametrize("context", ["64MiB", "1GiB", 1 << 40])
def test_a_context_must_leave_room_on_the_device(context: int | str) -> None:
    with pytest.raises(residency.InvalidArgumentError, match="expected room for something beside"):
        sim.enable("64MiB", context=context)


@pytest.mark.parametrize("context", ["much", -1, "12 parsecs", 0.5])
def test_a_context_without_a_size_is_refused(context: object) -> None:
    with pytest.raises(residency.InvalidArgumentError, match="context is"):
        sim.enable("1GiB", context=context)
