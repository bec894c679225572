"""A restore that is interrupted anywhere leaves nothing behind, and another one is right."""

from __future__ import annotations

import gc

import pytest
import torch
from interruptions import count_lines, interrupted_at, spread
from runs import Run, assert_equal

import residency
from residency import RefusedError
from residency._transfer import lending

MOST = 48
ERRORS = (KeyboardInterrupt, torch.OutOfMemoryError)


class Broken(Run):
    """Has what a restore puts in place in other ways: lists of tensors, values, generators."""

    def __init__(self, device, **settings):
        super().__init__(device, **settings)
        self.extra["tensors"] = [torch.arange(3.0), {"a": torch.ones(2, device=device)}]
        self.scaler = torch.amp.GradScaler(device.type)

    @property
    def state(self):
        return {**super().state, "scaler": self.scaler}


def interrupted(line, action):
    """Interrupts an action, in one of two ways; returns where."""
    try:
        return interrupted_at(line, action, ERRORS[line % 2]("here"))
    except RefusedError as refused:  # memory that cannot be page-locked is refused with its size
        return str(refused)


@pytest.fixture
def saved(device, tmp_path):
    """Makes a save of a run of two steps, and says where such a run ends after four."""

    def make(**settings):
        run = Broken(device, **settings)
        run.train(range(2))
        checkpointer = residency.Checkpointer(tmp_path)
        checkpointer.save(1, run.state).wait()
        run.train(range(2, 4))
        return checkpointer, run.read()

    return make


@pytest.mark.parametrize("offload", [False, True])
def test_a_restore_interrupted_at_any_line_can_be_made_again(device, saved, pinned_bytes, offload):
    checkpointer, expected = saved(offload=offload)
    run = Broken(device, offload=offload, seed=5)

    def restore():
        checkpointer.restore(run.state)

    lines = count_lines(restore)
    run.train(range(2, 4))
    assert_equal(run.read(), expected)
    gc.collect()
    pinned = pinned_bytes()
    places = set()
    for line in spread(lines, MOST, seed=1):
        places.add(interrupted(line, restore))
        assert not lending
    assert len(places) > MOST // 4
    gc.collect()
    assert pinned_bytes() <= pinned
    restore()
    run.train(range(2, 4))
    assert_equal(run.read(), expected)
    checkpointer.save(2, run.state).wait()
    checkpointer.close()


def test_a_first_step_interrupted_while_it_moves_the_state_goes_on_at_the_next(device, saved):
    checkpointer, expected = saved()
    run = Broken(device, seed=5)
    hooks = run.optimizer._optimizer_step_pre_hooks

    def move():
        for hook in list(hooks.values()):
            hook(run.optimizer, (), {})

    checkpointer.restore(run.state)
    lines = count_lines(move)
    for line in spread(lines, MOST // 2, seed=2):
        checkpointer.restore(run.state)
        interrupted_at(line, move, KeyboardInterrupt("here"))
        run.train(range(2, 3))
    checkpointer.restore(run.state)
    run.train(range(2, 4))
    assert_equal(run.read(), expected)
    checkpointer.close()


def test_load_into_interrupted_at_any_line_can_be_made_again(device, saved, pinned_bytes):
    checkpointer, _ = saved()
    path = checkpointer._directory.path / "step-00000001"
    run, whole = Broken(device, seed=5), Broken(device, seed=6)
    residency.load_into(whole.model, path)

    def load():
        residency.load_into(run.model, path)

    lines = count_lines(load)
    gc.collect()
    pinned = pinned_bytes()
    for line in spread(lines, MOST // 2, seed=3):
        with torch.no_grad():
            run.model.inner.weight.zero_()
        interrupted(line, load)
    gc.collect()
    assert pinned_bytes() <= pinned
    load()
    found, expected = run.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    checkpointer.close()
