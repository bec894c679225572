"""Queued work: what may not be seen before a wait is never seen, whatever the schedule allows.

Every missing wait here is one that the checker would also report; it is off: the bytes speak.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from residency import sim

pytestmark = pytest.mark.sim

SIZE = 1000
Enable = Callable[[str], torch.device]


@pytest.fixture
def lane() -> torch.Stream:
    sim.enable("1GiB", schedule="late")
    return torch.Stream(device="sim")


def _host_tensor(value: float = 0.0) -> torch.Tensor:
    return torch.full((SIZE,), value).pin_memory()


def _device_tensor(value: float) -> torch.Tensor:
    tensor = torch.full((SIZE,), value, device="sim")
    torch.accelerator.synchronize()
    return tensor


def test_a_copy_read_before_it_is_waited_for_has_not_happened(lane: torch.Stream) -> None:
    host, source = _host_tensor(), _device_tensor(1.0)
    with lane:
        host.copy_(source, non_blocking=True)
    assert host.sum().item() == 0.0
    lane.synchronize()
    assert host.sum().item() == SIZE


def test_a_source_overwritten_during_its_copy_tears_the_copy(lane: torch.Stream) -> None:
    sim.enable("1GiB", schedule="overtake")
    host, source = _host_tensor(), _device_tensor(1.0)
    with lane:
        host.copy_(source, non_blocking=True)
    source.fill_(7.0)
    lane.synchronize()
    assert host.sum().item() == 7.0 * SIZE


def test_a_copy_that_does_not_wait_for_the_kernel_before_it_misses_its_result(
    lane: torch.Stream,
) -> None:
    host, source = _host_tensor(), _device_tensor(1.0)
    source.mul_(5.0)
    with lane:
        host.copy_(source, non_blocking=True)
    lane.synchronize()
    assert host.sum().item() == SIZE


@pytest.mark.parametrize("schedule", ["late", "overtake", "eager"])
def test_waiting_for_events_gives_the_right_bytes_under_every_schedule(
    lane: torch.Stream, schedule: str
) -> None:
    sim.enable("1GiB", schedule=schedule, check_races=True)
    host, source = _host_tensor(), _device_tensor(1.0)
    source.mul_(5.0)
    lane.wait_stream(torch.accelerator.current_stream())
    with lane:
        host.copy_(source, non_blocking=True)
    copied = lane.record_event()
    torch.accelerator.current_stream().wait_event(copied)
    source.fill_(9.0)
    copied.synchronize()
    assert host.sum().item() == 5.0 * SIZE
    assert source.sum().item() == 9.0 * SIZE


def test_a_slot_refilled_without_a_wait_gives_the_kernel_the_wrong_bucket(
    lane: torch.Stream,
) -> None:
    sim.enable("1GiB", schedule="overtake")
    slot, total = _device_tensor(0.0), _device_tensor(0.0)
    current = torch.accelerator.current_stream()
    for value in (1.0, 2.0):
        with lane:
            slot.copy_(_host_tensor(value), non_blocking=True)
        current.wait_stream(lane)
        total.add_(slot)  # the second refill does not wait for the first of these
    assert total.sum().item() != 3.0 * SIZE


def test_memory_freed_without_record_stream_is_torn_under_its_reader(lane: torch.Stream) -> None:
    for is_recorded in (True, False):
        host, source = _host_tensor(), _device_tensor(3.0)
        with lane:
            host.copy_(source, non_blocking=True)
        if is_recorded:
            source.record_stream(lane)
        del source
        _device_tensor(4.0)
        lane.synchronize()
        assert (host[0].item() == 3.0) is is_recorded


def test_a_blocking_copy_and_item_see_finished_work(lane: torch.Stream) -> None:
    tensor = _device_tensor(1.0)
    tensor.add_(1.0)
    assert tensor.cpu()[0].item() == 2.0
    tensor.add_(1.0)
    assert tensor[0].item() == 3.0


def test_pageable_memory_is_copied_at_once(lane: torch.Stream) -> None:
    host = torch.zeros(SIZE)
    tensor = _device_tensor(1.0)
    tensor.add_(1.0)
    host.copy_(tensor, non_blocking=True)
    assert host.sum().item() == 2.0 * SIZE


def test_polling_an_event_ends(lane: torch.Stream) -> None:
    host, source = _host_tensor(), _device_tensor(1.0)
    with lane:
        for _ in range(5):
            host.copy_(source, non_blocking=True)
    event = lane.record_event()
    polls = 0
    while not event.query():
        polls += 1
        assert polls < 100
    assert polls > 0
    assert host.sum().item() == SIZE


def test_an_unrecorded_event_holds_nothing_up(lane: torch.Stream) -> None:
    event = torch.Event("sim")
    assert event.query()
    event.synchronize()
    lane.wait_event(event)
    lane.synchronize()


def test_elapsed_time_between_events_is_not_negative(lane: torch.Stream) -> None:
    first, second = (torch.Event("sim", enable_timing=True) for _ in range(2))
    first.record()
    _device_tensor(1.0)
    second.record()
    assert first.elapsed_time(second) >= 0.0


def test_host_scalars_are_read_when_the_kernel_is_launched(lane: torch.Stream) -> None:
    tensor, factor = _device_tensor(1.0), torch.tensor(2.0)
    tensor.mul_(factor)
    factor.fill_(50.0)
    assert tensor.sum().item() == 2.0 * SIZE


def test_a_queued_kernel_takes_pythons_numbers_as_an_unqueued_one_does(lane: torch.Stream) -> None:
    scalar, matrix = torch.tensor(0.1), torch.full((3, 3), 0.1)  # a 0-dim tensor takes part in
    for tensor in (scalar, matrix, scalar.bfloat16()):  # type promotion, a number must not
        queued = tensor.to("sim").mul_(0.3).add_(1, alpha=0.7).div_(3)
        expected = tensor.clone().mul_(0.3).add_(1, alpha=0.7).div_(3)
        assert torch.equal(queued.cpu(), expected)


def test_an_error_of_a_queued_kernel_is_raised_at_its_call(lane: torch.Stream) -> None:
    tensor = _device_tensor(1.0)
    with pytest.raises(RuntimeError, match="size"):
        tensor.add_(torch.ones(SIZE + 1, device="sim"))
    torch.accelerator.synchronize()


@pytest.mark.parametrize("ask", ["event", "stream"])
def test_what_is_queued_is_not_ready_when_it_is_asked_for(lane: torch.Stream, ask: str) -> None:
    host, source = _host_tensor(), _device_tensor(1.0)
    done = torch.Event("sim")
    with lane:
        host.copy_(source, non_blocking=True)
        done.record()
    asked = {"event": done, "stream": lane}[ask]
    assert not asked.query()
    while not asked.query():  # each question makes a piece of progress, so that loops end
        pass
    assert host.eq(1.0).all()


def test_streams_run_in_the_order_of_their_own_work(lane: torch.Stream) -> None:
    tensor = _device_tensor(0.0)
    lane.wait_stream(torch.accelerator.current_stream())
    with lane:
        tensor.add_(1.0)
        tensor.mul_(10.0)
        tensor.add_(2.0)
    torch.accelerator.current_stream().wait_stream(lane)
    assert tensor[0].item() == 12.0


def test_autograd_on_the_device_waits_as_it_does_on_cuda(lane: torch.Stream) -> None:
    for schedule in ("late", "overtake"):
        sim.enable("1GiB", schedule=schedule, check_races=True)
        weight = torch.ones(SIZE, device="sim", requires_grad=True)
        lane.wait_stream(torch.accelerator.current_stream())
        with lane:
            loss = (weight * 3.0).sum()
        torch.accelerator.current_stream().wait_stream(lane)
        (loss * 2.0).backward()
        assert weight.grad is not None
        assert weight.grad.sum().item() == 6.0 * SIZE


def test_an_event_is_waited_for_through_a_stream_that_had_nothing_but_waits_left(
    lane: torch.Stream,
) -> None:
    host, source = _host_tensor(), _device_tensor(1.0)
    other = torch.Stream(device="sim")
    current = torch.accelerator.current_stream()
    with lane:
        copy = source * 2.0
    current.wait_stream(lane)  # all that the current stream has is this wait
    other.wait_stream(current)
    with other:
        host.copy_(copy, non_blocking=True)
    done = torch.Event("sim")
    done.record(other)
    done.synchronize()
    assert host.eq(2.0).all()
