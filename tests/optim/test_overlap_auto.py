"""``resident="auto"``: state stays on the device if the run leaves room, to the same bits."""

import gc
import random
from typing import Any

import pytest
import torch
from overlapped import BETWEEN, BUCKET, CLASSES, Run, check_same
from torch import nn

import residency
from residency import InvalidArgumentError, _device, sim
from residency._optim import _unit_step
from residency._optim._overlap._reserve import growth
from residency._transfer import Mover

pytestmark = pytest.mark.sim


@pytest.mark.parametrize("name", CLASSES)
def test_a_run_whose_state_stays_has_the_bits_of_a_resident_one_and_copies_nothing(device, name):
    resident, run = (Run(device, how, CLASSES[name]) for how in ("resident", "auto"))
    for _ in range(8):
        resident.step()
        run.step()
    before = run.optimizer.statistics()
    assert 0 < before.resident_bytes <= before.home_bytes
    resident.step()
    run.step()
    after = run.optimizer.statistics()
    if before.resident_bytes == before.home_bytes:
        assert after.copied_to_device_bytes == before.copied_to_device_bytes
        assert after.copied_to_host_bytes == before.copied_to_host_bytes
    check_same(run, resident)


@pytest.mark.parametrize("moment", ["after a step", "after a backward pass"])
@pytest.mark.parametrize("between", BETWEEN, ids=lambda each: each.__name__.strip("_"))
def test_anything_between_two_steps_keeps_the_bits_of_state_that_stays(device, between, moment):
    stock, run = (Run(device, how) for how in ("resident", "auto"))
    for each in (stock, run):
        for _ in range(5):
            each.step()
        if moment == "after a backward pass":
            each.accumulate()
        if each is run:
            assert run.ahead.kept_bytes > 0
        between(each)
        for _ in range(2):
            each.step()
    check_same(run, stock)
    assert run.ahead.kept_bytes == 0  # `check_same` reads the state


def _fail_in_part(run: Run, monkeypatch: Any, at: int, *, is_midway: bool) -> KeyboardInterrupt:
    """Takes a step whose part of this number fails, before or after it has changed a state."""
    shadow, calls = _unit_step.Shadow, []

    def fail(*args: Any) -> object:
        calls.append(1)
        made = shadow(*args)
        if len(calls) == at:
            if is_midway:
                next(iter(made.optimizer.state.values()))["exp_avg"].add_(1.0)
            raise KeyboardInterrupt
        return made

    with monkeypatch.context() as patch:
        patch.setattr(_unit_step, "Shadow", fail)
        with pytest.raises(KeyboardInterrupt) as error:
            run.optimizer.step()
    return error.value


@pytest.mark.parametrize("at", [1, 3, 9])
def test_a_step_that_fails_between_changes_goes_on_exactly(device, monkeypatch, at):
    stock, run = (Run(device, how) for how in ("stream", "auto"))
    for each in (stock, run):
        for _ in range(6):
            each.step()
        each.accumulate()
        if each is run:
            assert run.ahead.kept_bytes == run.optimizer.statistics().home_bytes
        error: Any = _fail_in_part(each, monkeypatch, at, is_midway=False)
        for parameter in error.stepped_parameters:
            parameter.grad = None
        if not error.parameters_in_part:
            each.optimizer.step()
        each.optimizer.zero_grad()
        each.step()
    check_same(run, stock)


def test_a_step_that_fails_in_a_change_names_the_states_that_stay_and_are_changed(
    device, monkeypatch
):
    counts = []
    for how in ("stream", "auto"):
        run = Run(device, how)
        for _ in range(6):
            run.step()
        run.accumulate()
        error: Any = _fail_in_part(run, monkeypatch, 1, is_midway=True)
        counts.append(len(error.parameters_in_part))
    assert counts[0] == 0  # what was changed was a slot, and the home has the state from before
    assert counts[1] > 0
    assert run.ahead.kept_bytes == 0


def test_the_memory_of_state_that_goes_comes_behind_all_that_used_it(device, monkeypatch):
    def steps():
        run = Run(device, "auto", bucket=BUCKET // 3)
        for _ in range(5):
            run.step()
        assert run.ahead.kept_bytes > 0
        run.ahead.bring_home()
        for _ in range(3):
            run.step()
        torch.accelerator.synchronize()

    steps()
    monkeypatch.setattr(Mover, "follow_to_device", lambda *_: None)
    with pytest.raises(sim.RaceError):
        steps()


def test_a_parking_takes_the_state_that_stays_home(device):
    run = Run(device, "auto")
    for _ in range(5):
        run.step()
    assert run.ahead.kept_bytes > 0
    residency.park(run.model)
    assert run.ahead.held_bytes == 0
    residency.unpark(run.model)


def test_state_that_stays_is_given_back_when_its_optimizer_dies(device):
    run = Run(device, "auto")
    for _ in range(5):
        run.step()
    kept = run.ahead.held_bytes
    before = _device.memory_allocated(device)
    del run.optimizer
    gc.collect()
    assert 0 < kept <= before - _device.memory_allocated(device)


def test_first_evaluations_have_the_room_and_later_ones_leave_the_state(device):
    run = Run(device, "auto")
    moved = []
    for _ in range(6):
        run.step()
    for _ in range(30):
        run.step()
        run.step()
        before = run.ahead.kept_bytes
        run.model.eval()
        with torch.no_grad():
            run.model(run.batch())
        run.model.train()
        moved.append(before - run.ahead.kept_bytes)
    assert moved[0] > 0
    assert moved[-1] == 0


def test_each_byte_that_moves_is_hidden_dropped_or_exposed(device):
    run = Run(device, "overlap")
    moved = []
    for index in range(12):
        before = run.optimizer.statistics()
        run.step(is_skipped=index == 8)  # what came for the step that is left out goes again
        after = run.optimizer.statistics()
        if index in {8, 9} or after.num_steps == before.num_steps:
            continue
        moved.append(after.hidden_bytes + after.exposed_bytes + after.dropped_bytes)
        device_bytes = after.copied_to_device_bytes - before.copied_to_device_bytes
        host_bytes = after.copied_to_host_bytes - before.copied_to_host_bytes
        assert moved[-1] == device_bytes + host_bytes
    assert len(moved) == 10


def test_auto_without_overlap_is_refused():
    optimizer = torch.optim.AdamW(nn.Linear(4, 4).parameters())
    with pytest.raises(InvalidArgumentError, match="overlap=True"):
        residency.offload_optimizer(optimizer, resident="auto")


def test_the_margin_is_the_one_that_the_docs_state():
    figures = [(10, 3.98), (20, 2.0), (40, 1.41), (100, 1.15), (300, 1.05), (10_000, 1.05)]
    assert [(n, round(growth(n), 2)) for n, _ in figures] == figures
    # Of longest lengths that are drawn evenly, how often the next ones go further than that.
    chance = random.Random(0)
    for num_seen in (3, 10, 30):
        beyond = 0
        for _ in range(20_000):
            seen = max(chance.random() for _ in range(num_seen))
            beyond += seen * growth(num_seen) < 1.0
        assert beyond <= 2
