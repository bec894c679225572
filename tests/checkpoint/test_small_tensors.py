"""What a save and a restore of many small tensors do for each of them, counted, not timed."""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import residency
from residency import Checkpointer
from residency._checkpoint._capture._capture import Capture
from residency._optim._trial import _first_step
from residency._transfer import SlabArena

SHAPES = ((16,), (8, 2), (5,))
PACKAGE = str(Path(residency.__file__).parent)


def parameters_like(device, count, dtype=torch.float32):
    return nn.ParameterList(
        nn.Parameter(torch.ones(SHAPES[i % len(SHAPES)], dtype=dtype, device=device))
        for i in range(count)
    )


def training(device, count, *, has_state, kind=torch.optim.AdamW, groups=None):
    """Many parameters and their offloaded optimizer, which has stepped or not."""
    model = parameters_like(device, count)
    optimizer = kind(model.parameters() if groups is None else groups(model), lr=1e-3)
    residency.offload_optimizer(optimizer)
    state = {"model": model, "optimizer": optimizer}
    if has_state:
        step_all(state)
    return state


def step_all(state):
    for parameter in state["model"]:
        parameter.grad = torch.ones_like(parameter)
    state["optimizer"].step()
    state["optimizer"].zero_grad()


@pytest.fixture
def trials(monkeypatch):
    """Every parameter of which a first step is tried out, with its group."""
    found = []
    state_schema = _first_step.state_schema

    def counting(optimizer, base, group, parameter, **options):
        found.append((dict(group), parameter))
        return state_schema(optimizer, base, group, parameter, **options)

    monkeypatch.setattr(_first_step, "state_schema", counting)
    return found


def test_a_first_step_is_tried_once_for_all_parameters_that_are_alike(device, tmp_path, trials):
    saved = training(device, 30, has_state=False)
    assert len(trials) == len(SHAPES)
    step_all(saved)
    assert len(trials) == len(SHAPES)  # by the offload; the first step has its answers
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, saved).wait()
        fresh = training(device, 30, has_state=False)
        trials.clear()
        checkpointer.restore(fresh)
    assert trials == []
    fresh["optimizer"].load_state_dict(saved["optimizer"].state_dict())
    assert len(trials) == len(SHAPES)


def test_a_forecast_for_a_first_save_tries_each_kind_of_parameter_once(device, tmp_path, trials):
    state = training(device, 30, has_state=False)
    trials.clear()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.prepare(state)
    assert len(trials) == len(SHAPES)


def test_a_rate_for_each_layer_asks_for_no_trial_of_its_own(device, trials):
    def layers(model):
        return [{"params": [p], "lr": 0.1 + i, "initial_lr": 0.1} for i, p in enumerate(model)]

    training(device, 30, has_state=False, groups=layers)
    assert len(trials) == len(SHAPES)


def test_settings_that_may_decide_a_state_ask_for_trials_of_their_own(device, trials):
    def halves(model):
        return [{"params": model[:15], "amsgrad": True}, {"params": model[15:]}]

    state = training(device, 30, has_state=False, groups=halves)
    assert len(trials) == 2 * len(SHAPES)
    step_all(state)
    values = state["optimizer"].state.values()
    assert ["max_exp_avg_sq" in each for each in values] == [True] * 15 + [False] * 15


class OfSize(torch.optim.Optimizer):
    """Makes states as large as a setting of the group says, and as its rate does."""

    def __init__(self, params, lr=1e-3, rank=1):
        super().__init__(params, {"lr": lr, "rank": rank})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    size = group["rank"] * (2 if group["lr"] > 0.5 else 1)
                    state["seen"] = torch.zeros(size, device=parameter.device)
                state["seen"].add_(parameter.grad.flatten()[0])
                parameter.sub_(parameter.grad, alpha=group["lr"])


def test_every_setting_of_a_foreign_class_counts_by_its_value(device, trials):
    groups = [{"rank": 1}, {"rank": 2}, {"rank": 1, "lr": 1.0}, {"rank": True}]
    state = training(
        device,
        8,
        has_state=False,
        kind=OfSize,
        groups=lambda model: [
            {**each, "params": model[2 * i : 2 * i + 2]} for i, each in enumerate(groups)
        ],
    )
    assert len(trials) == 8  # two shapes of each
    step_all(state)
    assert [len(each["seen"]) for each in state["optimizer"].state.values()] == [
        *(1, 1, 2, 2, 2, 2, 1, 1)
    ]


def calls_of(action):
    """Counts the calls of each Python function of the package in an action, on all threads."""
    calls = Counter()

    def note(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            calls[f"{Path(code.co_filename).name}:{code.co_name}:{code.co_firstlineno}"] += 1

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return calls


def calls_for_each_tensor(action_for, counts=(40, 80)):
    """Returns how many calls of each function one more tensor of a save or restore brings."""
    few, many = (calls_of(action_for(count)) for count in counts)
    more_tensors = 4 * (counts[1] - counts[0])
    return {name: (many[name] - few[name]) / more_tensors for name in many}


MOST_CALLS = 8  # of one function for one tensor


@pytest.mark.sim  # counts lines of Python, which are the same everywhere
def test_no_function_is_called_more_than_a_few_times_for_each_tensor_of_a_save(device, tmp_path):
    def saving(count):
        state = training(device, count, has_state=True)

        def action():
            with Checkpointer(tmp_path / str(count)) as checkpointer:
                checkpointer.save(1, state).wait()

        return action

    found = calls_for_each_tensor(saving)
    assert {name: each for name, each in found.items() if each > MOST_CALLS} == {}
    assert sum(found.values()) < 58  # a look for writes into each state that is lent among them


@pytest.mark.sim
def test_no_function_is_called_more_than_a_few_times_for_each_tensor_of_a_restore(device, tmp_path):
    def restoring(count):
        saved, fresh = (training(device, count, has_state=each) for each in (True, False))
        with Checkpointer(tmp_path / str(count)) as checkpointer:
            checkpointer.save(1, saved).wait()

        def action():
            with Checkpointer(tmp_path / str(count)) as checkpointer:
                checkpointer.restore(fresh)

        return action

    found = calls_for_each_tensor(restoring)
    assert {name: each for name, each in found.items() if each > MOST_CALLS} == {}
    assert sum(found.values()) < 130


def test_a_save_leaves_few_objects_for_each_tensor_to_the_collector(device, tmp_path):
    def objects_of(count):
        state = training(device, count, has_state=True)
        with Checkpointer(tmp_path / str(count)) as checkpointer:
            checkpointer.save(1, state).wait()
            gc.collect()
            gc.disable()
            try:
                before = gc.get_count()[0]
                captured = Capture(SlabArena(pin=False))
                captured.describe(state)
                captured.make_room()
                made = gc.get_count()[0] - before
                captured.release()
            finally:
                gc.enable()
        return made

    few, many = objects_of(40), objects_of(240)
    assert (many - few) / (4 * 200) < 11
