"""How a dry run brings training loops to their end, in the forms that people give them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from limits import WORKER_SECONDS
from tests.dryrun.event_lists import differences, recorded

from residency._dryrun import _steering
from residency._dryrun._telling import EVENTS

IDIOMS = Path(__file__).parent / "scripts" / "end_idioms.py"
STEPS = 2
# What was seen of each loop, steps apart.
SEEN = {
    "over_a_loader": ["save"],
    "epochs": ["evaluate 3", "save"],
    "steps_until_the_last": ["save"],
    "next_of_an_iterator": ["save"],
    "a_generator_that_cycles": ["save"],
    "a_generator_as_a_loader": ["save"],
    "no_loader": ["evaluate 3", "save"],
    "forever": ["evaluate 3", "save"],
    "epochs_without_a_loader": ["evaluate 3", "save"],
    "a_function_of_its_own": ["evaluate 3", "save"],
    "accumulation": ["save"],
    "accumulation_over_epochs": ["save"],
    "pairs_of_loaders_over_epochs": ["save"],
    "two_optimizers": ["generator", "generator", "save"],
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
    "evaluations_with_workers": ["evaluate 32", "save"],
    "samples_that_are_counted": ["warn of 2", "save"],
    "averages_over_batches": ["average 1.0", "save"],
    "folds": ["average 1.0", "fold", "average 1.0", "fold", "save"],
    "epochs_of_many_steps": ["evaluate 3", "save"],
    "the_last_of_a_try": ["epoch", "save"],
    "a_library_that_looks_ahead": ["evaluate 3", "save"],
    "the_last_of_a_function": ["else", "evaluate 3"],
    "a_training_and_another": ["evaluate 3", "evaluate 3", "save"],
    "stages_of_an_epoch": ["epoch"],
    "critics_of_two_optimizers": ["generator", "generator"],
    "critics_of_two_trainings": ["generator"] * 4,
    "an_endless_while_with_an_else": ["else"],
    "cycles_in_a_zip": ["save"],
    "as_long_as_it_learns": ["average 1.5"],
    "sweeps_without_end": ["sweep"] * 11,
    "made_in_the_first_round": ["save"],
    "a_loop_of_a_library": [],
    "a_generator_that_trains": ["round", "round", "evaluate 3", "return", "save"],
    "phases_of_an_epoch": ["test"] * 3,
    "epochs_around_a_map": ["average 1.0"],
    "a_value_that_leaves_an_endless_loop": ["returned 2"],
    "steps_in_another_thread": ["save"],
    "epochs_in_threads": ["evaluate 3", "save"],
}
BY_HAND = 20  # passes until they are taken for steps
RESUMES = 3  # at most: a script that loads in its loop is brought to its end, too
PATIENCE = 10 * STEPS  # of an optimizer, until each has made its steps
MADE = dict.fromkeys(SEEN, STEPS) | {
    "steps_by_hand": BY_HAND + STEPS,
    "folds": 2 * STEPS,
    "resumed": 2 * STEPS,
    "a_resume_in_the_loop": (1 + RESUMES) * STEPS,
    "evaluations_with_workers": 2 * STEPS,
    "two_optimizers": 5 * STEPS + STEPS,
    "critics_of_two_optimizers": 5 * STEPS + STEPS,
    "critics_of_two_trainings": 2 * (5 * STEPS + STEPS),
    "stages_of_an_epoch": PATIENCE + STEPS,
    "a_training_and_another": 2 * STEPS,
    "phases_of_an_epoch": 2 * STEPS,
    "sweeps_without_end": (1 + 10) * STEPS,
}
OF_OTHERS = {
    "two_optimizers": 2,
    "critics_of_two_optimizers": 2,
    "critics_of_two_trainings": 4,
    "stages_of_an_epoch": STEPS,
}


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("events")


@pytest.fixture(scope="module")
def found(recordings: Path) -> dict[str, Any]:
    command = [sys.executable, str(IDIOMS)]
    done = subprocess.run(
        command,
        env=os.environ | {EVENTS: str(recordings)},
        capture_output=True,
        text=True,
        timeout=WORKER_SECONDS,
        check=False,
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
    assert loop["ended"] == ("left" if name == "a_loop_of_a_library" else "finished"), loop


@pytest.mark.parametrize("name", MADE)
def test_no_step_more_is_made(found: dict[str, Any], name: str) -> None:
    assert found[name]["steps"] == MADE[name], found[name]


@pytest.mark.parametrize("name", MADE)
def test_the_steps_of_all_trainings_are_counted(found: dict[str, Any], name: str) -> None:
    loop = found[name]
    # None was counted of the passes before; of several optimizers those of one.
    others = BY_HAND if name == "steps_by_hand" else OF_OTHERS.get(name, 0)
    assert loop["counted"] == loop["steps"] - others, loop
    assert loop["was_cut"], loop


def test_what_a_loop_has_told_is_decided_alike_from_its_list(
    found: dict[str, Any], recordings: Path
) -> None:
    lists = [each for path in recordings.iterdir() if (each := recorded(path)).events]
    assert len(lists) == len(found)
    assert sum(len(each.events) for each in lists) > 1_500
    assert [each for events in lists for each in differences(_steering, events)] == []
