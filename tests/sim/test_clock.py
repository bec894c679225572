"""The simulated clock, calibrated against arithmetic: pipelines whose time a pencil gives.

A bucket is copied in, stepped, and copied out. Times are exact up to rounding; 1 % is demanded.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

import residency
from residency import sim

pytestmark = pytest.mark.sim

NUM_BUCKETS = 20
BUCKET_BYTES = 1 << 20
H2D, D2H, MEMORY = 10_000_000, 8_000_000, 40_000_000
IN = BUCKET_BYTES / H2D
OUT = BUCKET_BYTES / D2H
STEP = (
    2 * BUCKET_BYTES / MEMORY
)  # add_ of a number: its operand, read and written, counts once each


def _enable(schedule: str = "late", *, dry: bool = False, **rates: object) -> None:
    given = {
        "h2d_bytes_per_second": H2D,
        "d2h_bytes_per_second": D2H,
        "duplex_bytes_per_second": None,
        "memory_bytes_per_second": MEMORY,
        **rates,
    }
    sim.enable("1GiB", schedule=schedule, dry=dry, clock=sim.Clock(**given))  # type: ignore[arg-type]


@pytest.fixture(params=["late", "overtake", "eager"], autouse=True)
def schedule(request: pytest.FixtureRequest) -> Iterator[str]:
    _enable(request.param)
    yield request.param
    sim.enable("1GiB")


def _buffers(count: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    home = torch.zeros(BUCKET_BYTES, dtype=torch.uint8).pin_memory()
    return home, [torch.empty(BUCKET_BYTES, dtype=torch.uint8, device="sim") for _ in range(count)]


def _elapsed(first: torch.Event, last: torch.Event) -> float:
    last.synchronize()
    first.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def _mark() -> torch.Event:
    event = torch.Event("sim", enable_timing=True)
    event.record()
    return event


def _kernel(slot: torch.Tensor) -> None:
    torch.neg(slot, out=slot)


def _pipeline(num_slots: int) -> float:
    """Streams buckets over three streams with so many slots; returns the seconds that it takes."""
    home, slots = _buffers(num_slots)
    lanes = torch.Stream(device="sim"), torch.Stream(device="sim")
    current = torch.accelerator.current_stream()
    torch.accelerator.synchronize()
    begin = _mark()
    free: list[torch.Event] = [begin] * num_slots
    for bucket in range(NUM_BUCKETS):
        slot = slots[bucket % num_slots]
        lanes[0].wait_event(free[bucket % num_slots])
        with lanes[0]:
            slot.copy_(home, non_blocking=True)
        current.wait_stream(lanes[0])
        _kernel(slot)
        lanes[1].wait_stream(current)
        with lanes[1]:
            home.copy_(slot, non_blocking=True)
        free[bucket % num_slots] = lanes[1].record_event()
    current.wait_stream(lanes[1])
    end = _mark()
    torch.accelerator.synchronize()
    return _elapsed(begin, end)


def test_one_stream_takes_the_sum_of_all_parts() -> None:
    home, (slot,) = _buffers(1)
    torch.accelerator.synchronize()
    begin = _mark()
    for _ in range(NUM_BUCKETS):
        slot.copy_(home, non_blocking=True)
        _kernel(slot)
        home.copy_(slot, non_blocking=True)
    assert _elapsed(begin, _mark()) == pytest.approx(NUM_BUCKETS * (IN + STEP + OUT), rel=0.01)


def test_enough_slots_hide_all_but_the_slowest_part() -> None:
    # The slowest part runs without a pause; the first bucket's way in and step come before it.
    expected = IN + STEP + NUM_BUCKETS * OUT
    assert _pipeline(3) == pytest.approx(expected, rel=0.01)


def test_one_slot_leaves_a_bubble_in_every_bucket() -> None:
    assert _pipeline(1) == pytest.approx(NUM_BUCKETS * (IN + STEP + OUT), rel=0.01)


def test_two_slots_leave_the_bubble_that_a_pencil_finds() -> None:
    # A slot is busy for IN + STEP + OUT, and the two links take turns on the two slots.
    in_end = step_end = out_end = 0.0
    free = [0.0, 0.0]
    for bucket in range(NUM_BUCKETS):
        in_end = max(in_end, free[bucket % 2]) + IN
        step_end = max(step_end, in_end) + STEP
        out_end = max(out_end, step_end) + OUT
        free[bucket % 2] = out_end
    assert _pipeline(2) == pytest.approx(out_end, rel=0.01)


def test_both_directions_at_once_share_the_duplex_rate() -> None:
    _enable(duplex_bytes_per_second=8_000_000)
    home, (first, second) = _buffers(2)
    other = torch.zeros(BUCKET_BYTES, dtype=torch.uint8).pin_memory()
    lane = torch.Stream(device="sim")
    torch.accelerator.synchronize()
    begin = _mark()
    lane.wait_event(begin)
    first.copy_(home, non_blocking=True)
    with lane:
        other.copy_(second, non_blocking=True)
    # While the way in lasts, the way out has half of 8 MB/s; then its own 8 MB/s.
    left = BUCKET_BYTES - IN * 4_000_000
    event = torch.Event("sim", enable_timing=True)
    event.record(lane)
    assert _elapsed(begin, event) == pytest.approx(IN + left / D2H, rel=0.01)


def test_arithmetic_takes_its_operations_over_the_rate() -> None:
    _enable(operations_per_second=1e6, memory_bytes_per_second=None)
    left, right = torch.ones(20, 30, device="sim"), torch.ones(30, 40, device="sim")
    begin = _mark()
    torch.mm(left, right)
    assert _elapsed(begin, _mark()) == pytest.approx(2 * 20 * 30 * 40 / 1e6, rel=0.01)


@pytest.mark.parametrize(
    ("run", "num_operations"),
    [
        (lambda t: torch.bmm(t(3, 4, 5), t(3, 5, 6)), 2 * 3 * 4 * 5 * 6),
        (lambda t: torch.addmm(t(4, 6), t(4, 5), t(5, 6)), 2 * 4 * 5 * 6),
        (lambda t: functional.linear(t(7, 4, 5), t(6, 5), t(6)), 2 * 7 * 4 * 5 * 6),
        (lambda t: functional.conv2d(t(2, 3, 8, 8), t(4, 3, 3, 3), padding=1), 2 * 2 * 64 * 4 * 27),
        (
            lambda t: functional.scaled_dot_product_attention(*[t(2, 3, 16, 8)] * 3),
            4 * 2 * 3 * 16 * 16 * 8,
        ),
    ],
    ids=["bmm", "addmm", "linear", "conv2d", "attention"],
)
def test_the_operations_of_known_kernels_are_counted(run, num_operations: int) -> None:  # type: ignore[no-untyped-def]
    _enable(operations_per_second=1e6, memory_bytes_per_second=None)
    begin = _mark()
    run(lambda *shape: torch.ones(shape, device="sim"))
    assert _elapsed(begin, _mark()) == pytest.approx(num_operations / 1e6, rel=0.01)


def test_the_host_waits_in_simulated_time_where_it_synchronises() -> None:
    home, (slot,) = _buffers(1)
    assert sim.now_seconds() == 0.0
    slot.copy_(home, non_blocking=True)
    assert sim.now_seconds() == 0.0
    torch.accelerator.synchronize()
    assert sim.now_seconds() == pytest.approx(IN, rel=0.01)
    slot.copy_(home)
    assert sim.now_seconds() == pytest.approx(2 * IN, rel=0.01)


def test_dry_mode_takes_the_same_time_as_the_real_one(schedule: str) -> None:
    times = []
    for dry in (False, True):
        _enable(schedule, dry=dry)
        times.append(_pipeline(2))
    _enable(schedule)
    assert times[0] == times[1] > 0


def test_times_repeat_exactly(schedule: str) -> None:
    first = _pipeline(3)
    _enable(schedule)
    assert _pipeline(3) == first


def test_a_streamed_optimizer_step_overlaps_its_copies() -> None:
    def step_seconds(slots: int) -> float:
        _enable()
        parameters = [torch.nn.Parameter(torch.zeros(1 << 16, device="sim")) for _ in range(16)]
        optimizer = torch.optim.AdamW(parameters, foreach=True)
        residency.offload_optimizer(optimizer, bucket="512KiB", slots=slots)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        torch.accelerator.synchronize()
        begin = sim.now_seconds()
        optimizer.step()
        torch.accelerator.synchronize()
        return sim.now_seconds() - begin

    state_bytes = 16 * (1 << 16) * 8
    serial = step_seconds(1)
    assert serial > state_bytes / H2D + state_bytes / D2H
    assert step_seconds(3) < 0.75 * serial


@pytest.mark.parametrize(
    "rates",
    [
        {"h2d_bytes_per_second": 0},
        {"d2h_bytes_per_second": "8 parsecs"},
        {"duplex_bytes_per_second": -1},
        {"memory_bytes_per_second": 0},
        {"operations_per_second": 0.0},
        {"operations_per_second": float("nan")},
    ],
)
def test_a_rate_that_means_nothing_is_refused(rates: dict[str, object]) -> None:
    with pytest.raises(residency.InvalidArgumentError, match=next(iter(rates))):
        _enable(**rates)


def test_without_a_clock_events_carry_the_hosts_time() -> None:
    sim.enable("1GiB")
    begin = _mark()
    torch.ones(1000, device="sim").sum()
    assert _elapsed(begin, _mark()) > 0
    assert sim.now_seconds() == 0.0
