"""How a dry run brings training loops to their end, in the forms that people give them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from limits import WORKER_SECONDS

IDIOMS = Path(__file__).parent / "scripts" / "idioms.py"
STEPS = 2
# What was seen of each loop, steps apart; a loop that is the last of its script has nothing after.
SEEN = {
    "over_a_loader": ["save"],
    "epochs": ["evaluate 3", "save"],
    "steps_until_the_last": ["save"],
    "next_of_an_iterator": ["save"],
    "a_generator_that_cycles": ["save"],
    "a_generator_as_a_loader": ["save"],
    "no_loader": ["evaluate 3", "save"],
    "a_counter": ["save"],
    "forever": ["evaluate 3", "save"],
    "in_a_context": ["save False"],
    "epochs_without_a_loader": ["evaluate 3", "save"],
    "a_function_of_its_own": ["evaluate 3", "save"],
    "accumulation": ["save"],
    "accumulation_over_epochs": ["save"],
    "pairs_of_loaders_over_epochs": ["save"],
    "two_optimizers": ["generator", "save"],
    "a_progress_bar": ["save"],
    "a_stream": ["save"],
    "early_return": ["save"],
    "resumed": ["save"],
    "a_resume_in_the_loop": ["epoch", "save"],
    "resumes_without_end": [],
    "a_loop_that_comes_last": [],
    "steps_by_hand": ["save"],
    "gradients_before_the_optimizer": ["save"],
    "a_long_evaluation": ["evaluate 32", "keep 1000", "save"],
    "evaluations_with_workers": ["evaluate 32", "evaluate 1", "save"],
    "averages_over_batches": ["average 1.0", "save"],
    "folds": ["average 1.0", "fold", "average 1.0", "fold", "save"],
    "epochs_of_many_steps": ["evaluate 3", "save"],
}
BY_HAND = 20  # passes until they are taken for steps
RESUMES = 3  # at most: a script that loads in its loop is brought to its end, too
MADE = {name: STEPS for name in SEEN if name != "two_optimizers"} | {
    "steps_by_hand": BY_HAND + STEPS,
    "folds": STEPS + 1,  # the loader of a second training is over after its first step
    "resumed": 2 * STEPS,
    "a_resume_in_the_loop": (1 + RESUMES) * STEPS,
    "resumes_without_end": (1 + RESUMES) * STEPS,
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    command = [sys.executable, str(IDIOMS)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=WORKER_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {each["name"]: each for each in lines}


def test_every_loop_is_expected(found: dict[str, Any]) -> None:
    assert set(found) == set(SEEN)


@pytest.mark.parametrize("name", SEEN)
def test_what_comes_after_the_steps_is_seen(found: dict[str, Any], name: str) -> None:
    loop = found[name]
    assert [each for each in loop["seen"] if each != "step"] == SEEN[name], loop
    is_left = not SEEN[name]
    assert loop["ended"] == ("left" if is_left else "finished"), loop


@pytest.mark.parametrize("name", MADE)
def test_no_step_more_is_made(found: dict[str, Any], name: str) -> None:
    assert found[name]["steps"] == MADE[name], found[name]


@pytest.mark.parametrize("name", [name for name in MADE if name != "folds"])
def test_the_steps_of_all_trainings_are_counted(found: dict[str, Any], name: str) -> None:
    loop = found[name]
    # None was counted of the passes before.
    by_hand = BY_HAND if name == "steps_by_hand" else 0
    assert loop["counted"] == loop["steps"] - by_hand, loop
    assert loop["was_cut"], loop


def test_steps_go_on_until_every_optimizer_has_made_one(found: dict[str, Any]) -> None:
    seen = found["two_optimizers"]["seen"]
    assert seen.index("generator") == 6  # five steps of the other, and its own
    assert found["two_optimizers"]["steps"] <= 8
