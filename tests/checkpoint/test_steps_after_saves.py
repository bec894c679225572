"""A step waits for the copies of a save that are under way, once, and for none that are over."""

from __future__ import annotations

import gc

import pytest
import torch

import residency
from residency import _device
from residency._transfer import Gate, _events, gate_of
from residency._transfer._gate import gates


class Counted:
    """The current stream, which counts what it is made to wait for."""

    def __init__(self, stream, waits):
        self.device = stream.device
        self._stream = stream
        self._waits = waits

    def wait_event(self, event):
        self._waits.append(event)
        self._stream.wait_event(event)


@pytest.fixture(autouse=True)
def fresh_gate(device, monkeypatch):
    """A gate at which nothing is left of earlier tests, which end no reads."""
    monkeypatch.setitem(gates, device, Gate(device))


@pytest.fixture
def waits_of(monkeypatch):
    """Counts the waits on events of the current stream in a call."""

    def count(call):
        waits, current_stream = [], _device.current_stream
        with monkeypatch.context() as patch:
            patch.setattr(_device, "current_stream", lambda d: Counted(current_stream(d), waits))
            call()
        return len(waits)

    return count


@pytest.fixture
def training(device):
    """A plain optimizer over many tensors, that has stepped."""
    parameters = [torch.nn.Parameter(torch.ones(256, device=device)) for _ in range(30)]
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"parameters": dict(enumerate(parameters)), "optimizer": optimizer}


def waited_for(tree, tmp_path):
    return residency.snapshot(tree).wait


def seen_done(tree, tmp_path):
    snapshot = residency.snapshot(tree)

    def ask():
        while not snapshot.is_done():
            pass

    return ask


def dropped(tree, tmp_path):
    snapshots = [residency.snapshot(tree)]
    return snapshots.clear


def saved(tree, tmp_path):
    with residency.Checkpointer(tmp_path) as checkpointer:  # the directory has one at a time
        checkpointer.save(1, tree).wait()
    return gc.collect


@pytest.mark.parametrize("begin", [waited_for, seen_done, dropped, saved])
def test_once_a_save_is_over_a_step_waits_for_nothing(device, training, waits_of, tmp_path, begin):
    step, gate = training["optimizer"].step, gate_of(device)
    for _ in range(2):
        end = begin(training, tmp_path)
        if begin is not saved:
            assert waits_of(step) == 1  # for 90 storages, which one lane reads in order
        end()
        assert len(gate) == 0
        assert waits_of(step) == 0


def test_a_step_waits_once_for_a_lane_and_only_for_what_it_writes(device, training, waits_of):
    others = torch.ones(256, device=device)
    first = residency.snapshot(training)
    second = residency.snapshot({"others": others})
    third = residency.snapshot(training)
    assert waits_of(training["optimizer"].step) == 1
    first.wait()
    third.wait()
    assert waits_of(training["optimizer"].step) == 0
    assert len(gate_of(device)) == 1
    second.wait()
    assert len(gate_of(device)) == 0


def test_a_step_that_is_captured_neither_waits_for_a_copy_nor_asks_whether_it_is_over(
    device, training, waits_of, monkeypatch
):
    class Refusing(torch.Event):
        def query(self):
            assert not _device.is_capturing(device), "asked an event while capturing"
            return super().query()

    class Captured(torch.optim.SGD):
        def step(self, closure=None):
            """Writes nothing."""

    monkeypatch.setattr(_events, "new_event", lambda device, **_: Refusing(device.type))
    parameters = list(training["parameters"].values())
    snapshot = residency.snapshot(training)
    with monkeypatch.context() as patch:
        patch.setattr(_device, "is_capturing", lambda device: True)
        assert waits_of(Captured(parameters).step) == 0
    assert waits_of(residency.mutating(*parameters).__enter__) == 1  # around the replay
    snapshot.wait()
    assert len(gate_of(device)) == 0


def test_a_save_of_tensors_that_are_freed_leaves_nothing_at_the_gate(device):
    tensors = [torch.ones(256, device=device) for _ in range(10)]
    snapshot = residency.snapshot({"tensors": tensors})
    assert len(gate_of(device)) == 10
    addresses = [tensor.data_ptr() for tensor in tensors]
    assert len(gate_of(device).sources_of(addresses)) >= 10
    del tensors
    snapshot.wait()
    assert len(gate_of(device)) == 0
    assert gate_of(device).sources_of(addresses) == []


def test_what_a_caller_drops_is_free_as_soon_as_the_copies_are_done(device):
    before = torch.accelerator.memory_allocated()
    tensors = [torch.ones(256, device=device) for _ in range(10)]
    snapshot = residency.snapshot({"tensors": tensors})
    del tensors
    torch.accelerator.synchronize()
    assert snapshot.is_done()
    assert torch.accelerator.memory_allocated() == before
    assert [each.tolist() for each in snapshot.tree["tensors"]] == [[1.0] * 256] * 10
