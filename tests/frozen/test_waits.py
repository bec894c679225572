"""Every wait of a stream is needed: with any one of them gone, the race checker raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from frozen_lab import are_same, net, passes, run

import residency
from residency import sim
from residency._transfer import Flight, Mover

pytestmark = pytest.mark.sim


def _without_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mover, "land", lambda self, flight=None: None)


def _without_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mover, "follow_to_device", lambda self, event=None: None)


WAITS = {"the copy to the device": _without_arrival, "the readers of a slot": _without_readers}


@pytest.mark.parametrize("remove", WAITS.values(), ids=WAITS.keys())
def test_passes_without_one_of_their_waits_are_a_race(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, remove: Callable[[Any], None]
) -> None:
    model = net()
    residency.stream_frozen(model)
    passes(model, device, count=1)
    remove(monkeypatch)
    with pytest.raises(sim.RaceError):
        passes(model, device, count=3)


def test_units_that_leave_the_device_are_read_behind_what_wrote_them(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net().to(device)
    for parameter in model.parameters():
        parameter.data.mul_(2)
    monkeypatch.setattr(Mover, "follow_to_host", lambda self, event=None: None)
    with pytest.raises(sim.RaceError):
        residency.stream_frozen(model)
    monkeypatch.undo()
    assert all(p.device == device for p in model.parameters())


def test_a_slot_that_a_second_stream_reads_is_used_again_behind_it(device: torch.device) -> None:
    def step(model: Any, device: torch.device) -> list[torch.Tensor]:
        found = passes(model, device, count=1)
        side = torch.Stream(device=device)
        side.wait_stream(torch.accelerator.current_stream(device))
        with side:
            found += passes(model, device, count=1)
        torch.accelerator.current_stream(device).wait_stream(side)
        return found + passes(model, device, count=1)

    expected = run(net, step, device, streams=False).results
    assert are_same(run(net, step, device, streams=True).results, expected)


def test_no_pass_makes_the_host_wait(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    residency.stream_frozen(model)
    x = torch.randn(2, 8, 32).to(device)
    model(x).sum().backward()

    def refuse(*_: object) -> None:
        raise AssertionError("the host waits")

    monkeypatch.setattr(Flight, "wait", refuse)
    monkeypatch.setattr(Mover, "settle", refuse)
    model(x).sum().backward()
    model(x).sum().backward()


def test_the_next_unit_is_on_its_way_before_it_is_needed(device: torch.device) -> None:
    model = net(num_blocks=8)
    stream = residency.stream_frozen(model)
    passes(model, device, count=1)
    first = stream.statistics()
    assert first.num_late == 1  # the first of all
    passes(model, device, count=2)
    second = stream.statistics()
    assert (second.num_late, second.num_loads - first.num_loads) == (1, 2 * 2 * (8 - 2))
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(2, 8, 32).to(device))
    last = stream.statistics()
    assert last.num_loads - second.num_loads <= 3 * 8
    assert last.num_late <= 2  # where the evaluation begins anew, the first time
    assert last.copied_bytes == last.num_loads * last.slot_bytes
    assert last.exposed_seconds > 0
