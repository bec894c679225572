"""Calls inside of calls of the same thread: they work, or are refused and change nothing.

``tests/torture/test_signals.py`` does the same with real signals at random moments.
"""

from __future__ import annotations

import threading
from itertools import pairwise

import numpy
import pytest
import torch
from interruptions import called_at, count_lines, spread

import residency
from residency import RefusedError
from residency._checkpoint._job import Job
from residency._checkpoint._once import Once
from residency._checkpoint._save import SKIPPED

INSIDE = "inside of a .* that is not over"


class Calling:
    """Something with a state dict, which calls another function as it is read."""

    def __init__(self, call):
        self.call = call

    def state_dict(self):
        self.call()
        return {"n": 1}

    def load_state_dict(self, state):
        self.call()


@pytest.mark.parametrize("call", ["save", "prepare", "restore", "wait", "close", "save.wait"])
def test_a_call_inside_of_a_save_is_refused_and_the_save_is_published(tmp_path, call, held_writer):
    refused = []

    def inner():
        calls = {
            "save": lambda: checkpointer.save(7, {"x": 1}),
            "prepare": lambda: checkpointer.prepare({"x": 1}),
            "restore": lambda: checkpointer.restore({"x": 1}),
            "wait": checkpointer.wait,
            "close": checkpointer.close,
            "save.wait": earlier.wait,
        }
        with pytest.raises(RefusedError, match=INSIDE) as error:
            calls[call]()
        refused.append(str(error.value))

    with residency.Checkpointer(tmp_path, max_in_flight=2) as checkpointer:
        earlier = checkpointer.save(0, {"x": torch.ones(3)})
        outer = checkpointer.save(1, {"x": torch.ones(3), "loader": Calling(inner)})
        held_writer.set()
        assert "published" in repr(outer.wait())
        assert checkpointer.save(2, {"x": 1}).wait().is_done()
    assert checkpointer.steps() == [0, 1, 2]
    (said,) = refused
    assert "set a flag" in said
    assert said.startswith(call.removeprefix("save."))


def test_a_save_inside_of_a_restore_is_refused(tmp_path):
    with residency.Checkpointer(tmp_path) as checkpointer:
        state = {"loader": Calling(lambda: None)}
        checkpointer.save(1, state)
        state["loader"].call = lambda: checkpointer.save(2, {"x": 1})
        with pytest.raises(RefusedError, match=INSIDE):
            checkpointer.restore(state)
    assert checkpointer.steps() == [1]


def test_a_save_inside_of_a_wait_and_of_another_checkpointers_save_works(tmp_path, monkeypatch):
    first = residency.Checkpointer(tmp_path / "1")
    second = residency.Checkpointer(tmp_path / "2")
    first.save(1, {"loader": Calling(lambda: second.save(1, {"x": 1}))})
    wait = Once.wait

    def wait_and_save(self, seconds=None):
        if calls and threading.current_thread() is threading.main_thread():
            calls.pop()()
        return wait(self, seconds)

    calls = [lambda: first.save(2, {"x": 2}).wait()]
    monkeypatch.setattr(Once, "wait", wait_and_save)
    first.wait()
    assert not calls
    for each, steps in ((first, [1, 2]), (second, [1])):
        each.close()
        assert each.steps() == steps


def test_a_call_on_the_thread_that_writes_is_refused(tmp_path, monkeypatch):
    errors = []
    count = Job.count

    def call_and_count(self, num_bytes):
        count(self, num_bytes)

    def retire(self, step):
        for call in (checkpointer.wait, checkpointer.close):
            with pytest.raises(RefusedError, match="on the thread that writes") as error:
                call()
            errors.append(error.value)

    monkeypatch.setattr(Job, "count", call_and_count)
    monkeypatch.setattr(residency.Checkpointer, "_retire", retire)
    with residency.Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, {"x": 1}).wait()
        checkpointer.wait()
    assert len(errors) == 2
    assert checkpointer.steps() == [1]


@pytest.mark.parametrize("offload", [False, True], ids=["plain", "offloaded"])
@pytest.mark.parametrize("what", ["save", "step"])
def test_a_save_at_any_line_of_another_call_is_whole_or_refused(lab, tmp_path, offload, what):
    """As a handler does, which comes between any two lines of the library."""
    run = lab.run(offload=offload)
    run.step()
    checkpointer = residency.Checkpointer(tmp_path / "outer", max_in_flight=2)
    other = residency.Checkpointer(tmp_path / "other")
    made, numbers = [], iter(range(1 << 30))

    def save(into):
        made.append((into, into.save(next(numbers), run.state)))

    def act():
        run.step() if what == "step" else save(checkpointer)

    def handle():
        for each in (checkpointer, other):
            try:
                save(each)
            except RefusedError as error:
                refused.append(str(error))
        try:
            residency.snapshot(run.objects["model"].state_dict()).wait()
        except RefusedError as error:
            refused.append(str(error))

    refused = []
    act()
    lines = count_lines(act)
    for line in spread(lines, 12, 3):
        called_at(line, act, handle)
    for each in (checkpointer, other):
        each.close()
    for into, saved in made:
        assert "published" in repr(saved.wait()), saved
        assert saved.step in into.steps()
    assert all("inside of a" in each for each in refused), refused
    assert refused or what == "step"


def test_a_save_that_nobody_ended_has_an_error(tmp_path, monkeypatch):
    """Whatever ends a job without having written it."""
    monkeypatch.setattr(Job, "write", lambda job, *rest: job.finish())
    with residency.Checkpointer(tmp_path) as checkpointer:
        save = checkpointer.save(1, {"x": torch.ones(3)})
        with pytest.raises(residency.CheckpointError, match="step 1 did not come to its end"):
            save.wait()
    assert "failed" in repr(save)
    assert not checkpointer.steps()


def test_what_is_set_once_stays_and_wakes_all_who_wait():
    once = Once()
    assert once.wait(0.0) is None
    found = []
    threads = [threading.Thread(target=lambda: found.append(once.wait())) for _ in range(4)]
    for thread in threads:
        thread.start()
    once.set(SKIPPED)
    once.set(None)
    for thread in threads:
        thread.join(60)
    assert found == [SKIPPED] * 4
    assert once.wait() is once.value is SKIPPED


@pytest.mark.parametrize("kind", [numpy.int64, numpy.uint8, torch.tensor, int])
def test_a_step_of_another_integer_type_is_taken_as_a_number(tmp_path, kind):
    steps = [kind(step) for step in (3, 7)]
    with residency.Checkpointer(tmp_path, keep=2) as checkpointer:
        saves = [checkpointer.save(step, {"x": 1}) for step in steps]
    assert [type(save.step) for save in saves] == [int, int]
    assert all(early < late for early, late in pairwise(checkpointer.steps()))
    assert checkpointer.steps() == [3, 7]


@pytest.mark.parametrize("step", [True, 1.0, numpy.float64(2), numpy.int64(-1), "3", None])
def test_a_step_that_is_no_whole_number_is_refused(tmp_path, step):
    checkpointer = residency.Checkpointer(tmp_path)
    with pytest.raises(residency.InvalidArgumentError, match="expected a whole number"):
        checkpointer.save(step, {"x": 1})
    checkpointer.close()
