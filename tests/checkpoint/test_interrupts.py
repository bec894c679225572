"""An exception at whatever line of a save leaves whole saves, no loans, and a run that goes on.

Each line that is taken meets one of two exceptions; where ``RESIDENCY_TEST_LINES`` asks for more
lines, both.
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import textwrap
from functools import partial

import pytest
import torch
from interruptions import count_lines, interrupted_at, spread
from limits import WORKER_SECONDS

import residency
from residency._checkpoint._capture import _capture
from residency._checkpoint._job import Job
from residency._transfer import Flight

_IS_LONG = "RESIDENCY_TEST_LINES" in os.environ
MOST = 16
SEED = 11
BOTH = pytest.mark.parametrize("offload", [False, True], ids=["plain", "offloaded"])
KINDS = (KeyboardInterrupt, torch.OutOfMemoryError)


@pytest.fixture(autouse=True)
def guard():
    """Ends a hang with the stacks of all threads."""
    faulthandler.dump_traceback_later(3600 if _IS_LONG else 60, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


def places(lines, share=1):
    """Yields lines and what is raised there, the one and the other in turn."""
    for index, line in enumerate(spread(lines, max(MOST // share, 4), SEED)):
        for kind in KINDS if _IS_LONG else (KINDS[index % 2],):
            yield line, kind


class Trial:
    """Trains, and knows what every save must hold."""

    def __init__(self, lab, path, offload, no_loans, **settings):
        self.same = lab.same
        self.no_loans = no_loans
        self.run, self.twin = lab.run(offload=offload), lab.run(offload=offload)
        for each in (self.run, self.twin):
            each.step()
        self.checkpointer = residency.Checkpointer(path, keep=2, **settings)
        self.number = 0
        self.expected = {}

    def advance(self):
        self.run.step()
        self.number += 1
        self.expected[self.number] = self.run.copy()

    def save(self):
        return self.checkpointer.save(self.number, self.run.state)

    def check(self, where):
        """Demands of every published save that it has the bytes of its own step."""
        self.checkpointer.wait()
        assert self.no_loans(), where
        for step in self.checkpointer.steps():
            assert self.checkpointer.restore(self.twin.state, step=step) == step
            self.same(self.twin.copy(), self.expected[step], f"{step}, {where}")
        assert self.no_loans(), where


@BOTH
def test_an_exception_at_any_line_of_a_save_loses_nothing_and_publishes_nothing_else(
    lab, tmp_path, offload, no_loans, pinned_bytes
):
    trial = Trial(lab, tmp_path, offload, no_loans, verify="full" if offload else "gate")
    homes = pinned_bytes()
    trial.advance()
    trial.save().wait()
    trial.advance()
    lines = count_lines(trial.save)
    pinned = trial.save().wait().statistics().pinned_bytes
    for line, kind in places(lines):
        trial.advance()
        newest = trial.checkpointer.steps()[-1]
        where = f"line {line} of {lines}, {interrupted_at(line, trial.save, kind)}"
        trial.check(where)
        assert trial.checkpointer.steps()[-1] in (newest, trial.number), where
        again = trial.save().wait()
        assert again.statistics().pinned_bytes == pinned, where
    trial.check("the last")
    trial.checkpointer.close()
    assert pinned_bytes() <= homes + (2 * 4096 if offload else 0)  # a step's spare: two buckets


@BOTH
def test_after_an_exception_in_a_snapshot_the_next_step_and_snapshot_are_right(
    lab, tmp_path, offload, no_loans, pinned_bytes
):
    trial = Trial(lab, tmp_path, offload, no_loans)

    def take():
        kept.append(residency.snapshot(trial.run.state))
        kept[0].wait()

    kept = []
    lines = count_lines(take)
    for line, kind in places(lines):
        kept = []
        trial.advance()
        where = f"line {line} of {lines}, {interrupted_at(line, take, kind)}"
        trial.run.step()
        while kept:  # the exception came into its wait, which is asked again
            trial.same(kept.pop().tree, trial.expected[trial.number], where)
        assert no_loans(), where
        trial.advance()
        trial.same(residency.snapshot(trial.run.state).tree, trial.expected[trial.number], where)


@BOTH
@pytest.mark.parametrize("what", ["prepare", "wait", "close"])
def test_an_exception_at_any_line_of_another_call_loses_no_save(
    lab, tmp_path, offload, no_loans, pinned_bytes, what
):
    def begin(number):
        trial = Trial(lab, tmp_path / str(number), offload, no_loans)
        trial.advance()
        trial.save()
        arguments = [trial.run.state] if what == "prepare" else []
        return trial, partial(getattr(trial.checkpointer, what), *arguments)

    trial, act = begin(0)
    lines = count_lines(act)
    trial.checkpointer.close()
    before = pinned_bytes()
    for line, kind in places(lines, 4):
        trial, act = begin(line)
        where = f"line {line} of {lines}, {interrupted_at(line, act, kind)}"
        if what == "close":
            trial.checkpointer.close()
            trial.checkpointer = residency.Checkpointer(tmp_path / str(line), keep=2)
        trial.advance()
        trial.save()
        trial.check(where)
        assert trial.checkpointer.steps() == [1, 2], where
        trial.checkpointer.close()
    del trial, act
    assert pinned_bytes() <= before


def test_a_save_that_takes_the_place_of_another_loses_none_where_it_fails(
    lab, tmp_path, no_loans, held_writer
):
    trial = Trial(lab, tmp_path, True, no_loans, policy="replace", max_in_flight=2, spare="all")
    for _ in range(2):  # one is being written, one waits
        trial.advance()
        trial.save()
    with pytest.raises(residency.RefusedError, match="Nothing was saved"):
        trial.checkpointer.save(3, {**trial.run.state, "bad": object()})
    held_writer.set()
    trial.check("refused")
    assert trial.checkpointer.steps() == [1, 2]
    trial.checkpointer.close()


def test_an_exception_at_any_line_of_a_save_that_replaces_another_leaves_whole_ones(
    lab, tmp_path, no_loans, held_writer
):
    trial = Trial(lab, tmp_path, False, no_loans, policy="replace", max_in_flight=2)

    def round_of(line, kind=None):
        held_writer.clear()
        for _ in range(2):
            trial.advance()
            trial.save()
        trial.advance()
        where = count_lines(trial.save) if line is None else interrupted_at(line, trial.save, kind)
        held_writer.set()
        trial.check(f"{line}, {where}")
        assert trial.checkpointer.steps()[-1] >= trial.number - 2, where
        return where

    for line, kind in places(round_of(None)):
        round_of(line, kind)
    trial.checkpointer.close()


def test_an_error_of_the_device_that_stays_ends_a_save_with_its_own_error(
    lab, tmp_path, no_loans, monkeypatch
):
    """As after an assertion in a kernel: every event raises for good."""

    class Lost(Flight):
        def wait(self, *, asleep: bool = False) -> None:
            raise RuntimeError("device-side assert triggered")

        is_over = wait

    copy_group = _capture._copy_group

    def break_the_event(group, *rest):
        copy_group(group, *rest)
        group.flight = Lost(group.flight.event)

    trial = Trial(lab, tmp_path, True, no_loans)
    trial.advance()
    trial.save().wait()
    with monkeypatch.context() as patch:
        patch.setattr(_capture, "_copy_group", break_the_event)
        trial.advance()
        with pytest.raises(residency.CheckpointError, match="device-side assert"):
            trial.save().wait()
        trial.save()
        with pytest.raises(ZeroDivisionError) as error, trial.checkpointer:
            raise ZeroDivisionError
        assert "device-side assert" in "".join(error.value.__notes__)
    assert no_loans()
    trial.checkpointer = residency.Checkpointer(tmp_path, keep=2)
    trial.advance()
    trial.save()
    trial.check("after")
    trial.checkpointer.close()


def test_a_save_whose_bytes_are_gone_is_never_published(tmp_path, monkeypatch):
    write = Job.write

    def write_what_is_gone(job, *rest):
        job.captured.release()
        write(job, *rest)

    with residency.Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, {"x": torch.ones(3)}).wait()
        monkeypatch.setattr(Job, "write", write_what_is_gone)
        with pytest.raises(residency.CheckpointError, match="lists 'x' but holds no data for it"):
            checkpointer.save(2, {"x": torch.ones(3)}).wait()
        assert checkpointer.steps() == [1]


ALARMS = """
    import faulthandler, random, signal, sys, tempfile, time
    import torch, residency, residency.sim
    faulthandler.dump_traceback_later(60, exit=True)
    device = torch.device(residency.sim.enable("256MiB"))
    net = torch.nn.Linear(64, 64).to(device)
    optimizer = torch.optim.AdamW(net.parameters())
    residency.offload_optimizer(optimizer, bucket="4KiB")
    def step():
        net(torch.ones(2, 64, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    class Alarm(KeyboardInterrupt):
        pass
    def ring(*_):
        raise Alarm
    def is_alarm(error):
        # Python's own threads and conditions may raise another error out of an interrupt's.
        return error is not None and (isinstance(error, Alarm) or is_alarm(error.__context__))
    signal.signal(signal.SIGALRM, ring)
    chance = random.Random(5)
    checkpointer = residency.Checkpointer(tempfile.mkdtemp(), keep=3)
    number = hits = 0
    step()
    end = time.monotonic() + float(sys.argv[1])
    while time.monotonic() < end or hits < 20:
        number += 1
        step()
        mark = torch.full((1000,), float(number), device=device)
        try:
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 8e-3))
            checkpointer.save(number, {"mark": mark, "net": net, "optimizer": optimizer})
            signal.setitimer(signal.ITIMER_REAL, 0)
        except BaseException as error:
            signal.setitimer(signal.ITIMER_REAL, 0)
            if not is_alarm(error):
                raise
            hits += 1
        step()
        if number % 8 == 0:
            checkpointer.wait()
            for saved in checkpointer.steps():
                target = torch.zeros(1000, device=device)
                state = {"mark": target, "net": torch.nn.Linear(64, 64).to(device)}
                checkpointer.restore(state, step=saved, rng=False, strict=False)
                assert (target == saved).all(), (saved, target)
    checkpointer.close()
    from residency._transfer import lending
    assert not lending
    print("interrupted", hits)
"""


@pytest.mark.sim
def test_alarms_at_any_moment_of_a_save_leave_whole_saves(tmp_path):
    """Real signals, which Python takes between two instructions of a line, too."""
    seconds = "2" if MOST <= 1000 else "60"
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(ALARMS), seconds],
        capture_output=True,
        text=True,
        timeout=WORKER_SECONDS,
    )
    assert child.returncode == 0, child.stderr
    assert "interrupted" in child.stdout
