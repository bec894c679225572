"""The race checker: every kind of missing wait raises, its right version passes.

Both operations are named with their lines, and the verdict does not depend on the schedule.
"""

from __future__ import annotations

import pytest
import torch

from residency import sim

pytestmark = pytest.mark.sim

SIZE = 1000


@pytest.fixture(params=["late", "overtake", "eager"])
def lane(request: pytest.FixtureRequest) -> torch.Stream:
    sim.enable("1GiB", schedule=request.param, check_races=True)
    return torch.Stream(device="sim")


def _current() -> torch.Stream:
    return torch.accelerator.current_stream()


def _settled(value: float = 1.0) -> torch.Tensor:
    tensor = torch.full((SIZE,), value, device="sim")
    torch.accelerator.synchronize()
    return tensor


def _pinned() -> torch.Tensor:
    return torch.zeros(SIZE).pin_memory()


@pytest.mark.parametrize("is_right", [True, False])
def test_reading_what_a_kernel_writes_needs_a_wait(lane: torch.Stream, is_right: bool) -> None:
    tensor, host = _settled(), _pinned()
    tensor.add_(1.0)
    if is_right:
        lane.wait_stream(_current())
        with lane:
            host.copy_(tensor, non_blocking=True)
        lane.synchronize()
        assert host[0].item() == 2.0
        return
    with pytest.raises(sim.RaceError, match=r"reads what 'aten::add.*' on stream 0"), lane:
        host.copy_(tensor, non_blocking=True)


@pytest.mark.parametrize("is_right", [True, False])
def test_writing_what_a_copy_reads_needs_a_wait(lane: torch.Stream, is_right: bool) -> None:
    tensor, host = _settled(), _pinned()
    with lane:
        host.copy_(tensor, non_blocking=True)
    if is_right:
        _current().wait_stream(lane)
        tensor.add_(1.0)
        lane.synchronize()
        assert host[0].item() == 1.0
        return
    with pytest.raises(sim.RaceError, match=r"writes what 'copy_ \(device to host\)'.*reads"):
        tensor.add_(1.0)


@pytest.mark.parametrize("is_right", [True, False])
def test_writing_what_a_copy_writes_needs_a_wait(lane: torch.Stream, is_right: bool) -> None:
    tensor, host = _settled(), _pinned()
    with lane:
        tensor.copy_(host, non_blocking=True)
    if is_right:
        _current().wait_stream(lane)
        tensor.fill_(3.0)
        assert tensor[0].item() == 3.0
        return
    with pytest.raises(sim.RaceError, match=r"writes what 'copy_ \(host to device\)'.*writes"):
        tensor.fill_(3.0)


@pytest.mark.parametrize("is_right", [True, False])
def test_a_slot_is_refilled_only_after_the_kernel_that_reads_it(
    lane: torch.Stream, is_right: bool
) -> None:
    slot, total = _settled(), _settled(0.0)
    buckets = [torch.full((SIZE,), value).pin_memory() for value in (1.0, 2.0)]

    def step() -> None:
        for bucket in buckets:
            if is_right:
                lane.wait_stream(_current())
            with lane:
                slot.copy_(bucket, non_blocking=True)
            _current().wait_stream(lane)
            total.add_(slot)

    if is_right:
        step()
        assert total[0].item() == 3.0
        return
    with pytest.raises(sim.RaceError, match="writes what 'aten::add"):
        step()


@pytest.mark.parametrize("is_right", [True, False])
def test_two_kernels_on_two_streams_need_a_wait(lane: torch.Stream, is_right: bool) -> None:
    tensor, other = _settled(), torch.Stream(device="sim")
    with lane:
        tensor.mul_(2.0)
    if is_right:
        other.wait_event(lane.record_event())
        with other:
            tensor.add_(1.0)
        other.synchronize()
        assert tensor[0].item() == 3.0
        return
    with pytest.raises(sim.RaceError, match="aten::mul"), other:
        tensor.add_(1.0)


@pytest.mark.parametrize("is_right", [True, False])
def test_memory_that_another_stream_reads_needs_record_stream(
    lane: torch.Stream, is_right: bool
) -> None:
    tensor, host = _settled(5.0), _pinned()
    with lane:
        host.copy_(tensor, non_blocking=True)
    if is_right:
        tensor.record_stream(lane)
    del tensor
    if is_right:
        torch.empty(SIZE, device="sim")
        lane.synchronize()
        assert host[0].item() == 5.0
        return
    with pytest.raises(sim.RaceError, match=r"'allocation'.*record_stream"):
        torch.empty(SIZE, device="sim")


@pytest.mark.parametrize("is_right", [True, False])
def test_a_lane_waits_for_the_allocation_of_what_it_fills(
    lane: torch.Stream, is_right: bool
) -> None:
    host = _pinned()
    slot = torch.empty(SIZE, device="sim")
    if is_right:
        lane.wait_stream(_current())
        with lane:
            slot.copy_(host, non_blocking=True)
        return
    with pytest.raises(sim.RaceError, match="'allocation'"), lane:
        slot.copy_(host, non_blocking=True)


@pytest.mark.parametrize("is_right", [True, False])
def test_a_slab_is_read_only_after_the_copy_that_fills_it(
    lane: torch.Stream, is_right: bool
) -> None:
    home, first, second = _pinned(), _settled(), _settled()
    other = torch.Stream(device="sim")
    with lane:
        home.copy_(first, non_blocking=True)
    if is_right:
        other.wait_stream(lane)
        with other:
            second.copy_(home, non_blocking=True)
        return
    with pytest.raises(sim.RaceError, match="host to device"), other:
        second.copy_(home, non_blocking=True)


def test_neighbours_in_one_buffer_do_not_race(lane: torch.Stream) -> None:
    tensor, host = _settled(), _pinned()
    half = SIZE // 2
    with lane:
        host[:half].copy_(tensor[:half], non_blocking=True)
    tensor[half:].add_(1.0)
    with pytest.raises(sim.RaceError, match="race on 4 bytes"):
        tensor[half - 1 :].add_(1.0)


def test_interleaved_columns_do_not_race(lane: torch.Stream) -> None:
    matrix = torch.zeros(10, 8, device="sim")
    torch.accelerator.synchronize()
    with lane:
        matrix[:, 0].add_(1.0)
    matrix[:, 1].add_(1.0)
    with pytest.raises(sim.RaceError):
        matrix[:, 0].add_(1.0)


def test_readers_on_two_streams_do_not_race(lane: torch.Stream) -> None:
    tensor, first, second = _settled(), _pinned(), _pinned()
    with lane:
        first.copy_(tensor, non_blocking=True)
    second.copy_(tensor, non_blocking=True)
    with pytest.raises(sim.RaceError):
        tensor.zero_()


def test_waits_carry_over_through_a_third_stream(lane: torch.Stream) -> None:
    tensor, other = _settled(), torch.Stream(device="sim")
    with lane:
        tensor.add_(1.0)
    other.wait_stream(lane)
    _current().wait_stream(other)
    tensor.add_(1.0)
    assert tensor[0].item() == 3.0


def test_a_wait_does_not_cover_what_is_issued_after_its_event(lane: torch.Stream) -> None:
    tensor = _settled()
    event = lane.record_event()
    with lane:
        tensor.add_(1.0)
    _current().wait_event(event)
    with pytest.raises(sim.RaceError):
        tensor.add_(1.0)


@pytest.mark.parametrize("wait", ["stream", "event", "query", "device", "item"])
def test_a_host_that_has_waited_orders_what_it_issues_next(lane: torch.Stream, wait: str) -> None:
    tensor = _settled()
    with lane:
        tensor.add_(1.0)
    event = lane.record_event()
    if wait == "stream":
        lane.synchronize()
    elif wait == "event":
        event.synchronize()
    elif wait == "query":
        while not event.query():
            pass
    elif wait == "device":
        torch.accelerator.synchronize()
    else:
        with lane:
            assert tensor[0].item() == 2.0
    tensor.add_(1.0)
    assert tensor[0].item() == 3.0


def test_both_operations_are_named_with_their_lines(lane: torch.Stream) -> None:
    tensor = _settled()
    with lane:
        tensor.add_(1.0)
    with pytest.raises(sim.RaceError) as caught:
        tensor.mul_(2.0)
    message = str(caught.value)
    assert message.count(f"{__file__}:") == 2
    assert "'aten::mul" in message
    assert "'aten::add" in message
    assert f"race on {4 * SIZE} bytes" in message


def test_a_race_changes_nothing_and_is_reported_where_it_is(lane: torch.Stream) -> None:
    tensor = _settled()
    with lane:
        tensor.add_(1.0)
    with pytest.raises(sim.RaceError):
        tensor.mul_(50.0)
    _current().wait_stream(lane)
    tensor.mul_(2.0)
    assert tensor[0].item() == 4.0


def test_the_checker_is_off_unless_asked_for() -> None:
    sim.enable("1GiB")
    lane = torch.Stream(device="sim")
    tensor = _settled()
    with lane:
        tensor.add_(1.0)
    tensor.add_(1.0)
    torch.accelerator.synchronize()


def test_turning_the_checker_on_holds_nothing_of_before_against_anybody() -> None:
    sim.enable("1GiB")
    lane = torch.Stream(device="sim")
    tensor = _settled()
    with lane:
        tensor.add_(1.0)
    sim.enable("1GiB", check_races=True)
    tensor.add_(1.0)
    assert tensor[0].item() == 3.0
