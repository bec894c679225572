"""Events are recorded anew once nobody refers to them, and never before."""

from __future__ import annotations

import threading

import pytest
import torch

import residency
from residency import _device
from residency._transfer import lanes_of


@pytest.fixture
def made(device, monkeypatch):
    """The events that are made from now on, as whether each is timed."""
    monkeypatch.setattr(_device, "_events", {})
    events = []

    make = _device._make_event

    def count(device, *, timed):
        events.append(timed)
        return make(device, timed=timed)

    monkeypatch.setattr(_device, "_make_event", count)
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
            mine = [_device.new_event(device) for _ in range(3)]
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
