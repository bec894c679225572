"""Every wait of the streamed step is needed: with any one of them gone, the race checker raises."""

from collections.abc import Callable

import pytest
import torch

import residency
from residency._optim import _unit_step
from residency._transfer import Gate, Mover

pytestmark = pytest.mark.sim


def _without_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mover, "follow_to_device", lambda self: None)


def _without_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mover, "land", lambda self, flight: None)


def _without_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mover, "follow_to_host", lambda self: None)


def _without_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    before_write = Gate.before_write

    def unless_on_a_lane(self: Gate, tensors: object, *, stream: object = None) -> None:
        if stream is None:
            before_write(self, tensors)

    monkeypatch.setattr(Gate, "before_write", unless_on_a_lane)


def _without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gate, "before_free", lambda self, tensors: None)


WAITS = {
    "a slot's allocation": _without_allocated,
    "the copy to the device": _without_ready,
    "the step": _without_done,
    "the copy home from a slot that is used again": _without_slot,
    "the copy home from a slot that is freed": _without_end,
}


@pytest.mark.parametrize("remove", WAITS.values(), ids=WAITS.keys())
def test_a_step_without_one_of_its_waits_is_a_race(
    lab, monkeypatch: pytest.MonkeyPatch, remove: Callable[[pytest.MonkeyPatch], None]
) -> None:
    from residency import sim

    optimizer, parameters = lab.adamw(offload=True)
    lab.take_steps(optimizer, parameters, range(2))
    remove(monkeypatch)
    with pytest.raises(sim.RaceError):
        lab.take_steps(optimizer, parameters, range(2, 4))


def test_with_all_its_waits_the_same_run_passes(lab) -> None:
    optimizer, parameters = lab.adamw(offload=True)
    lab.take_steps(optimizer, parameters, range(4))
    assert isinstance(optimizer, residency.OffloadedOptimizer)
    assert optimizer.statistics().num_steps == 4


def test_a_step_that_fails_midway_leaves_no_copy_on_its_way_into_freed_memory(
    lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer, parameters = lab.adamw(offload=True)
    lab.take_steps(optimizer, parameters, range(2))
    before = torch.accelerator.memory_allocated()
    shadow = _unit_step.Shadow
    calls = []

    def fail_at_the_second_unit(*args: object) -> object:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return shadow(*args)

    monkeypatch.setattr(_unit_step, "Shadow", fail_at_the_second_unit)
    lab.set_gradients(parameters, 2)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    monkeypatch.undo()
    del calls[:]
    # What the failed step freed is written by others at once; a copy under way would be a race.
    torch.full((50_000,), 7.0, device=lab.device)
    torch.accelerator.synchronize()
    lab.take_steps(optimizer, parameters, range(2, 4))
    assert optimizer.statistics().num_steps == 4
    lab.set_gradients(parameters, 2, missing=False)
    assert torch.accelerator.memory_allocated() <= before + 512 * len(parameters)
