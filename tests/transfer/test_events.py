"""Events are recorded anew once nobody refers to them, and never before."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import residency
from residency import _device
from residency._transfer import _events, lanes_of


@pytest.fixture
def made(device, monkeypatch):
    """The events that are made from now on, as whether each is timed."""
    monkeypatch.setattr(_events, "_events", {})
    events = []

    make = _events._make_event

    def count(device, *, timed):
        events.append(timed)
        return make(device, timed=timed)

    monkeypatch.setattr(_events, "_make_event", count)
    return events


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD], ids=["adamw", "sgd"])
def test_a_step_makes_no_event_once_there_are_those_of_two_steps(device, made, make):
    parameters = [torch.nn.Parameter(torch.ones(64, 64, device=device)) for _ in range(9)]
    options = {"momentum": 0.9} if make is torch.optim.SGD else {"fused": True}
    optimizer = make(parameters, lr=1e-3, **options)
    residency.offload_optimizer(optimizer, bucket="32KiB", slots=2)

    def step() -> None:
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    for _ in range(3):
        step()
    num_units = optimizer.statistics().num_buckets
    assert num_units > 3
    # Around a unit's copies to the device and home and around the wait for them, in two steps.
    assert made.count(True) <= 2 * (6 * num_units + 6)
    assert made.count(False) <= 4
    made.clear()
    for _ in range(4):
        step()
    assert not made
    assert optimizer.statistics().exposed_seconds >= 0
    assert not made


def test_saves_beside_steps_make_no_event_either(device, made, tmp_path):
    parameters = [torch.nn.Parameter(torch.ones(64, 64, device=device)) for _ in range(4)]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    with residency.Checkpointer(tmp_path) as checkpointer:
        for number in range(6):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            checkpointer.save(number, {"optimizer": optimizer}).wait()
            if number == 2:
                made.clear()
    assert not made


def test_an_event_that_anybody_has_is_left_as_it_is(device, made):
    lanes = lanes_of(device)
    stream = _device.current_stream(device)
    kept = [lanes.mark(stream) for _ in range(9)]
    assert len({id(event) for event in kept}) == len(made) == 9
    assert all(lanes.mark(stream) is not event for event in kept)
    timed = lanes.mark(stream, timed=True)
    assert made.count(True) == 1
    before = {id(event) for event in kept}
    kept.clear()
    made.clear()
    again = [lanes.mark(stream) for _ in range(9)]
    assert {id(event) for event in again} & before
    assert not made
    later = lanes.mark(stream, timed=True)
    later.synchronize()
    assert timed.elapsed_time(later) >= 0


def test_threads_never_get_the_event_that_another_one_has(device, made):
    errors, seen = [], threading.Barrier(4)

    def take() -> None:
        seen.wait()
        for _ in range(500):
            mine = [_events.new_event(device) for _ in range(3)]
            with lock:
                taken.update(map(id, mine))
                if len(taken) % 3:
                    errors.append(len(taken))
            with lock:
                taken.difference_update(map(id, mine))
                del mine

    lock, taken = threading.Lock(), set()
    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(made) < 500


def test_the_writer_of_a_save_sleeps_while_it_waits_for_copies(device, tmp_path, monkeypatch):
    slept = []
    sleep = time.sleep

    class NeverSpinning(torch.Event):
        is_late = False

        def query(self):
            self.is_late, is_asked = True, self.is_late
            return is_asked and super().query()

        def synchronize(self):
            assert threading.current_thread() is threading.main_thread(), "a core is kept busy"
            super().synchronize()

    def count(seconds: float) -> None:
        slept.append((threading.current_thread(), seconds))
        sleep(seconds)

    parameter = torch.nn.Parameter(torch.arange(1 << 14, dtype=torch.float32, device=device))
    optimizer = residency.offload_optimizer(torch.optim.AdamW([parameter]))
    tree = {"weight": parameter, "optimizer": optimizer}
    monkeypatch.setattr(_events, "new_event", lambda device, **_: NeverSpinning(device.type))
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with residency.Checkpointer(tmp_path) as checkpointer:
        monkeypatch.setattr(_events.time, "sleep", count)
        checkpointer.save(1, tree).wait()
        monkeypatch.undo()
        expected = parameter.detach().cpu()
        parameter.data.zero_()
        checkpointer.restore(tree)
    assert torch.equal(parameter.detach().cpu(), expected)
    mine = [seconds for thread, seconds in slept if thread is not threading.current_thread()]
    assert mine
    assert all(0 < seconds <= 1e-3 for seconds in mine)


def test_a_wait_asleep_ends_with_what_the_event_raises(device):
    class Broken:
        def query(self):
            raise RuntimeError("device-side assert triggered")

    with pytest.raises(RuntimeError, match="device-side assert"):
        _events.wait_asleep(Broken())
