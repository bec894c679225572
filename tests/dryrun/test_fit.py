"""How settings and numbers are looked for, with a script that is arithmetic and takes no time."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.dryrun.facts import KINDS, MIB, NOTHING, answered, phase

from residency._dryrun import RunSettings, settings_that_fit
from residency._dryrun._answer import Answer, first_line
from residency._dryrun._lines import lines_of
from residency._dryrun._offers import offers
from residency._transfer import default_bucket


class Script:
    """A script whose need follows from the settings, and which counts its runs."""

    def __init__(
        self, phases: Callable[[RunSettings], list[dict[str, Any]]], capacity: int
    ) -> None:
        self.phases = phases
        self.capacity = capacity
        self.runs: list[RunSettings] = []
        self.names: list[str] = []
        self.found: dict[str, Any] = {}

    def run(self, settings: RunSettings, name: str) -> Answer:
        self.runs.append(settings)
        self.names.append(name)
        held = {"context": settings.others, **self.found}
        return answered(self.phases(settings), self.capacity, **held)

    def fit(self) -> list[Any]:
        first = answered(self.phases(NOTHING), self.capacity, **self.found)
        return list(settings_that_fit(NOTHING, first, self.run))


def training(settings: RunSettings) -> list[dict[str, Any]]:
    """Peaks of a training with 1,000 MiB of weights and 2,000 of state."""
    state = 2000 if settings.offload is None else settings.offload // MIB
    slots = 0 if settings.offload is None else 100
    activations = 100 if settings.checkpointing else 900
    return [
        phase("forward", 1000, 0, state, activations, 0),
        phase("optimizer step", 1000, 1000, state, 0, slots),
    ]


def test_no_more_is_tried_than_what_can_suffice_and_as_much_stays_resident_as_fits() -> None:
    script = Script(training, 3500)
    tried = script.fit()
    assert [each.name for each in tried] == ["the optimizer's state on the host"]
    assert tried[-1].answer.fits
    # The state may take 3500 - 1000 - 1000 - 100 MiB, and is found to one part in 64.
    resident = script.runs[-1].offload // MIB
    assert 1400 - 2000 // 64 <= resident <= 1400
    line = f'residency.offload_optimizer(optimizer, resident="{resident}MiB")'
    assert tried[-1].lines == ("import residency", f"{line}  # at once")
    assert len(script.runs) <= 3
    seconds = f"{(2000 - resident) * MIB / 55e9:.2f} s"
    assert tried[-1].cost == f"{seconds} a step over PCIe 5 (PCIe 4: twice that)"


def test_what_makes_it_fit_leaves_the_room_that_it_is_told_to() -> None:
    script = Script(training, 3500)
    first = answered(training(NOTHING), 3500)
    for left in (0, 300 * MIB):
        script.runs.clear()
        tried = list(settings_that_fit(NOTHING, first, script.run, left=left))
        assert [each.answer.fits for each in tried] == [True]
        assert {run.others for run in script.runs} == {left}
        resident = max(run.offload for run in script.runs)
        assert (1400 - 2000 // 64) * MIB <= resident + left <= 1400 * MIB
        # The peak is that of the script with the lines, on a device of which nothing is kept free.
        changed = answered(training(replace(NOTHING, offload=resident)), 3500)
        assert tried[-1].answer.needed == changed.needed
        assert tried[-1].answer.headroom >= left


def test_what_stays_resident_is_what_was_run_and_fits_where_the_need_is_no_straight_line() -> None:
    def stepped(settings: RunSettings) -> list[dict[str, Any]]:
        state = 2000 if settings.offload is None else -(-settings.offload // (300 * MIB)) * 300
        return [phase("optimizer step", 1000, 1000, state, 0, 0)]

    script = Script(stepped, 3250)
    tried = script.fit()
    assert tried[-1].answer.fits
    resident = max(
        run.offload for run in script.runs if answered(stepped(run), script.capacity).fits
    )
    assert f"{resident // MIB}MiB" in tried[-1].lines[1]
    assert resident >= 900 * MIB
    assert len(script.runs) <= 5


def test_two_changes_are_made_together_where_neither_is_enough() -> None:
    def both(settings: RunSettings) -> list[dict[str, Any]]:
        state = 2000 if settings.offload is None else settings.offload // MIB
        return [phase("forward", 1000, 0, state, 100 if settings.checkpointing else 1500, 0)]

    script = Script(both, 2400)
    script.found = {"recomputed": ["layers"]}
    (tried,) = script.fit()
    assert tried.answer.fits
    assert tried.name == "the optimizer's state on the host and gradient checkpointing"
    assert "for block in model.layers:  # once the model is made" in tried.lines
    assert script.runs[-1].offload // MIB == 1300


def test_pieces_are_joined_first_where_tensors_alone_would_fit() -> None:
    def pieces(settings: RunSettings) -> list[dict[str, Any]]:
        return [
            phase("forward", 1000, 0, 0, 500, 0, reserved=None if settings.environment else 1900)
        ]

    script = Script(pieces, 1600)
    (tried,) = script.fit()
    assert tried.lines == ("export PYTORCH_ALLOC_CONF=expandable_segments:True",)
    assert script.runs[0].environment


def test_weights_that_are_too_large_are_helped_by_nothing_and_nothing_is_run() -> None:
    script = Script(lambda settings: [phase("set up", 5000, 0, 0, 0, 0)], 4000)
    assert script.fit() == []
    assert script.runs == []


def test_checkpointing_is_not_tried_for_a_phase_without_gradients() -> None:
    script = Script(lambda settings: [phase("evaluate", 1000, 0, 0, 4000, 0)], 4000)
    assert script.fit() == []
    assert script.runs == []


def test_a_change_that_takes_more_than_it_gives_does_not_hide_what_fits_without_it() -> None:
    """All passes of a step but the first find its gradients on the device."""

    def small(settings: RunSettings) -> list[dict[str, Any]]:
        divisor = 16 // settings.arguments.get("batch_size", 16)
        kept = 150 if settings.checkpointing else 500
        read = 200 if settings.loads_on_host else 300  # which the script holds all the same
        return [
            phase("load", 1000, 0, 0, 0, read),
            phase("forward", 1000, 600 if divisor > 1 else 0, 0, kept // divisor, read),
            phase("optimizer step", 1000, 600, 0, 0, 0),
        ]

    script = Script(small, 1650)
    numbers = {"batch_size": 16, "accumulation": 1}
    script.found = {
        "arguments": {name: {"flag": f"--{name}", "value": numbers[name]} for name in numbers}
    }
    tried = script.fit()
    assert [each.answer.fits for each in tried] == [False, False, False, True]
    assert {"batch_size": 1, "accumulation": 16} in [each.arguments for each in script.runs]
    assert tried[-1].name == "gradient checkpointing"


def test_a_change_with_which_the_script_fails_is_not_taken_for_one_that_fits() -> None:
    script = Script(training, 3500)
    run = script.run

    def failing(settings: RunSettings, name: str) -> Answer:
        if settings.offload is None:
            return run(settings, name)
        return answered([phase("set up", 1000, 0, 0, 0, 0)], 3500, error="RefusedError: no")

    first = answered(training(NOTHING), 3500)
    tried = list(settings_that_fit(NOTHING, first, failing))
    assert [each.answer.fits for each in tried] == [False]


def test_a_run_that_fails_before_its_arguments_were_made_has_the_lines_of_the_first() -> None:
    script = Script(training, 3500)
    script.found = {"libraries": ["transformers.trainer"]}
    script.found["trainer"] = {"arguments": "TrainingArguments", "numbers": {}}
    first = answered(training(NOTHING), 3500, **script.found)

    def run(settings: RunSettings, name: str) -> Answer:
        return answered([], 3500, error="ValueError: out is not empty", **script.found | NOT_YET)

    tried = list(settings_that_fit(NOTHING, first, run))
    assert tried
    assert not any(each.answer.fits for each in tried)
    assert all(each.lines for each in tried)


NOT_YET: dict[str, Any] = {"trainer": {"numbers": {}}}


def test_the_scripts_own_flags_are_used_where_it_has_them() -> None:
    argument = {
        "batch_size": {"flag": "--batch-size", "value": 12},
        "accumulation": {"flag": "--accumulation", "value": 2},
        "gradient_checkpointing": {"flag": "--gradient-checkpointing", "value": False},
    }

    def of_arguments(settings: RunSettings) -> list[dict[str, Any]]:
        return [phase("forward", 1000, 0, 0, 100 * settings.arguments.get("batch_size", 12), 0)]

    script = Script(of_arguments, 1400)
    script.found = {"arguments": argument}
    tried = script.fit()
    assert script.runs[0].arguments == {"gradient_checkpointing": True}
    assert not tried[0].answer.fits  # the script does nothing with it
    assert tried[-1].answer.fits
    assert tried[-1].lines == ("--batch-size 3 --accumulation 8",)


def test_a_switch_that_is_on_is_not_offered() -> None:
    script = Script(lambda settings: [phase("forward", 1000, 0, 0, 1000, 0)], 1400)
    script.found = {"arguments": {"gradient_checkpointing": {"flag": "--gc", "value": True}}}
    assert script.fit() == []


class Invented(Script):
    """A script of random phases, in which each change does a random part of what it can.

    It also takes a random part of what it may: an offload its slots, and smaller batches the
    gradients that a pass finds there where a step has several.
    """

    NAMES = ("set up", "load", "forward", "optimizer step", "evaluate", "save")
    CHANGES = ("load", "defer", "save", "park", "offload", "checkpointing", "batch", "segments")

    def __init__(self, chance: random.Random) -> None:
        sizes = [0, 0, 200, 900, 2000]
        self.held = {name: [chance.choice(sizes) for _ in KINDS] for name in self.NAMES}
        self.does = {name: chance.choice([0.0, 0.3, 0.8, 1.0]) for name in self.CHANGES}
        self.takes = {name: chance.choice([0.0, 0.0, 0.5, 1.0]) for name in ("offload", "batch")}
        super().__init__(self.changed, round(chance.uniform(0.4, 1.0) * self.need(NOTHING)))
        numbers = {"batch_size": 16, "accumulation": 1}
        self.found = {
            "arguments": {name: {"flag": f"--{name}", "value": numbers[name]} for name in numbers}
        }

    def need(self, settings: RunSettings) -> int:
        return max(each["peak_reserved"] for each in self.changed(settings)) // MIB

    def changed(self, settings: RunSettings) -> list[dict[str, Any]]:
        return [self.phase_with(settings, name) for name in self.NAMES]

    def phase_with(self, settings: RunSettings, name: str) -> dict[str, Any]:
        weights, gradients, state, activations, other = self.held[name]
        divisor = 16 // settings.arguments.get("batch_size", 16)

        def left(change: str, *, is_made: bool = True) -> float:
            return 1 - self.does[change] * is_made

        copies = min(self.held["save"][-1], other)
        now = other - copies * (1 - left("save", is_made=settings.saves_on_host))
        now *= left("load", is_made=settings.loads_on_host)
        if name != "optimizer step":
            state *= left("defer", is_made=settings.defers_state)
        if name == "evaluate":
            state *= left("park", is_made=settings.parks_state)
        recomputes = settings.checkpointing and name != "evaluate"
        activations *= left("checkpointing", is_made=recomputes)
        smaller = 1 - self.does["batch"] * (divisor - 1) / divisor
        activations, now = activations * smaller, now * smaller
        if settings.offload is not None:
            state = max(state * left("offload"), min(state, settings.offload // MIB))
            states = max(held[2] for held in self.held.values())
            now += 3 * default_bucket(states * MIB, 0, 3) // MIB * self.takes["offload"]
        if divisor > 1 and name != "optimizer step":
            most = max(held[1] for held in self.held.values())
            gradients += (most - gradients) * self.takes["batch"]
        in_pieces = 300 * self.does["segments"] * (not settings.environment)
        held = [weights, gradients, state, activations, now]
        rounded = [-(-int(each * 16) // 16) for each in held]
        return phase(name, *rounded, reserved=sum(rounded) + int(in_pieces))

    def cheapest(self, but: Collection[str] = ()) -> str:
        """Tries every set; returns the name of the first that fits, "" where none does."""
        known = [o for o in offers(self.answer(NOTHING).found) if o.name not in but]
        for number in range(1, 1 << len(known)):
            chosen = [offer for index, offer in enumerate(known) if number >> index & 1]
            if len({offer.group for offer in chosen}) == len(chosen):
                settings = functools.reduce(
                    lambda so_far, each: each.change(so_far), chosen, NOTHING
                )
                if self.need(settings) <= self.capacity:
                    return " and ".join(offer.name for offer in chosen)
        return ""

    def answer(self, settings: RunSettings) -> Answer:
        return answered(self.changed(settings), self.capacity, **self.found)


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_the_cheapest_of_all_sets_is_found_by_few_runs(first: int) -> None:
    for seed in range(first, first + 10):
        script = Invented(random.Random(seed))
        if script.need(NOTHING) <= script.capacity:
            continue
        expected = script.cheapest()
        tried = script.fit()
        fitting = [each.name for each in tried if each.answer.fits]
        assert fitting == ([expected] if expected else []), seed
        if expected:
            assert tried[-1].answer.fits
        sets = [
            name for name, run in zip(script.names, script.runs, strict=True) if not run.offload
        ]
        assert len(set(sets)) == len(sets), "a set was run twice"
        # The cheapest, all that can help, one for each change, and again where changes take more.
        assert len(sets) <= 2 * len(offers(script.answer(NOTHING).found)), (seed, sets)


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_a_change_that_breaks_the_script_is_found_out_and_the_search_goes_on(first: int) -> None:
    for seed in range(first, first + 10):
        chance = random.Random(seed)
        script = Invented(chance)
        if script.need(NOTHING) <= script.capacity:
            continue
        names = [offer.name for offer in offers(script.answer(NOTHING).found)]
        breaking = set(chance.sample(names, chance.choice([1, 1, 2])))
        expected = script.cheapest(but=breaking)

        def run(
            settings: RunSettings, name: str, script: Any = script, breaking: Any = breaking
        ) -> Answer:
            if breaking & set(name.split(" and ")):
                script.names.append(name)
                return answered([], script.capacity, error=ON_TWO_DEVICES, **script.found)
            return script.run(settings, name)

        tried = list(settings_that_fit(NOTHING, script.answer(NOTHING), run))
        fitting = [each.name for each in tried if each.answer.fits]
        assert fitting == ([expected] if expected else []), seed
        for each in tried:
            assert each.suits is not bool(breaking & set(each.name.split(" and "))), seed
        assert len(tried) <= 2 * len(names), (seed, [each.name for each in tried])


def test_an_error_that_the_script_has_without_a_change_is_none_of_the_changes() -> None:
    script = Script(training, 3500)
    first = answered(training(NOTHING), 3500, **script.found)
    found = {**first.found, "ended": "error", "error": "ValueError: no such split"}
    first = replace(first, found=found)

    def run(settings: RunSettings, name: str) -> Answer:
        return answered(training(NOTHING), 3500, error="ValueError: no such split")

    assert [each.suits for each in settings_that_fit(NOTHING, first, run)][:1] == [True]


ON_TWO_DEVICES = "RuntimeError: Expected all tensors to be on the same device (train.py:9)"


def helped_by_nothing() -> Invented:
    script = Invented(random.Random(0))
    script.takes = dict.fromkeys(script.takes, 0.0)
    script.does = dict.fromkeys(script.CHANGES, 0.0)
    script.held = {name: [100, 100, 500, 900, 800] for name in script.NAMES}
    script.capacity = 2000
    return script


def test_two_runs_show_that_nothing_helps_where_no_change_does_what_it_could() -> None:
    script = helped_by_nothing()
    tried = script.fit()
    assert [each.answer.fits for each in tried] == [False, False]
    assert script.names == [each.name for each in tried]
    assert len(script.runs[1].arguments) == 2
    assert script.runs[1].checkpointing
    assert script.runs[1].offload == 0


def test_a_search_that_is_interrupted_ends() -> None:
    script = helped_by_nothing()
    script.found["was_interrupted"] = True
    assert len(script.fit()) == len(script.runs) == 1


def test_the_how_to_shows_the_lines_that_are_printed_today() -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/will-it-fit.md").read_text()
    (shown,) = re.findall(r"^changes that make it fit.*?^```", page, flags=re.MULTILINE | re.DOTALL)
    settings = RunSettings(folder="", capacity=0, offload=2469 * MIB, calls_back=True)
    trainer = {"class": "Trainer", "arguments": "TrainingArguments"}
    lines = lines_of(settings, {"libraries": ["transformers.trainer"], "trainer": trainer})
    assert [line.strip() for line in shown.splitlines()[3:-1]] == list(lines)


def test_a_script_that_failed_is_not_said_to_fit() -> None:
    phases = [phase("set up", 100, 0, 0, 0, 0)]
    begin, rest = first_line(answered(phases, 1000, error="ValueError"))
    assert (begin, rest[:18]) == ("the script failed", ": peak 100.00 MiB ")
    assert first_line(answered(phases, 1000))[0] == "fits"
