"""The device's bytes of frozen parameters: at most the slots, by the allocator's own journal."""

from __future__ import annotations

import functools
import gc
import struct
from collections.abc import Iterator

import pytest
import torch
from frozen_lab import net, passes, quantized, run

import residency
from residency._transfer import lanes_of
from residency_sim._backend import core
from residency_sim.dry_run import keep_journal, take_journal

pytestmark = pytest.mark.sim
_ENTRY = struct.Struct("<5q")  # address, bytes of a block (fewer than none: let go), ..., stream


@pytest.fixture
def journal() -> Iterator[None]:
    keep_journal()
    yield
    core().keep_journal(False)


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("use_reentrant", [None, False])
def test_the_peak_falls_by_all_units_but_the_slots(
    device: torch.device, use_reentrant: bool | None, slots: int
) -> None:
    make = functools.partial(net, use_reentrant=use_reentrant)
    resident = run(make, passes, device, streams=False)
    streamed = run(make, passes, device, streams=True, slots=slots)
    unit_bytes = streamed.stream.statistics().slot_bytes
    assert unit_bytes == sum(
        -(-p.nbytes // 512) * 512
        for p in resident.model.blocks[0].parameters()
        if not p.requires_grad
    )
    assert resident.peak_bytes - streamed.peak_bytes == (6 - slots) * unit_bytes


@pytest.mark.parametrize("slots", [2, 4])
def test_the_lanes_pool_never_has_more_than_the_slots(
    device: torch.device, journal: None, slots: int
) -> None:
    make = functools.partial(net, num_blocks=14, hidden=(40, 200, 8, 96, 333, 16, 512, 500))
    streamed = run(make, passes, device, streams=True, slots=slots)
    lane = lanes_of(device).h2d.stream_id
    held = most = num_taken = 0
    for _, num_bytes, _, _, stream in _ENTRY.iter_unpack(take_journal()):
        if stream == lane:
            held += num_bytes
            num_taken += num_bytes > 0
            most = max(most, held)
    figures = streamed.stream.statistics()
    assert num_taken > 14 * slots
    assert most == slots * figures.slot_bytes
    assert figures.here_bytes == held == most


def test_no_step_after_the_first_makes_the_reserve_grow(device: torch.device) -> None:
    model = quantized("hidden", num_blocks=8)
    with residency.stream_frozen(model, slots=3):
        passes(model, device, count=1)
        before = torch.accelerator.memory_reserved()
        passes(model, device, count=3)
        assert torch.accelerator.memory_reserved() == before


def test_the_reserve_of_large_units_falls_by_all_but_the_slots(device: torch.device) -> None:
    """Blocks of 24 MiB, so that segments are not shared."""
    mib = 1 << 20

    class Wide(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(6 * mib), requires_grad=False)
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale + self.weight[:4]

    def step(model: torch.nn.Module, device: torch.device) -> list[torch.Tensor]:
        loss = model(torch.ones(4, device=device)).sum()
        loss.backward()
        return [loss]

    def make() -> torch.nn.Module:
        return torch.nn.Sequential(*(Wide() for _ in range(6)))

    resident = run(make, step, device, streams=False)
    del resident.model
    streamed = run(make, step, device, streams=True)
    saved = resident.peak_reserved_bytes - streamed.peak_reserved_bytes
    assert resident.peak_bytes - streamed.peak_bytes == 4 * 24 * mib
    assert 4 * 24 * mib - saved <= 2 * mib  # the lane's pool has a small segment of its own


def test_at_rest_a_state_dict_takes_no_byte_of_the_device(device: torch.device) -> None:
    model = net()
    stream = residency.stream_frozen(model)
    passes(model, device, count=1)
    before = torch.accelerator.memory_allocated()
    state = model.state_dict()
    assert torch.accelerator.memory_allocated() == before
    assert all(state[f"{name}.k.weight"].is_cpu for name in stream.units)


def test_the_host_has_the_units_once_page_locked(
    device: torch.device, pinned_bytes: object
) -> None:
    before = pinned_bytes()  # type: ignore[operator]
    model = net()
    stream = residency.stream_frozen(model)
    figures = stream.statistics()
    held = pinned_bytes() - before  # type: ignore[operator]
    assert held == figures.pinned_bytes
    assert figures.home_bytes <= held < 2 * figures.home_bytes
    stream.stop()
    del model, stream
    assert pinned_bytes() == before  # type: ignore[operator]


def test_a_model_that_dies_takes_its_device_memory_along(device: torch.device) -> None:
    passes(net().to(device), device, count=1)  # workspaces
    gc.collect()
    before = torch.accelerator.memory_allocated()
    call, apply = torch.nn.Module.__call__, torch.nn.Module._apply
    model = net()
    residency.stream_frozen(model)
    passes(model, device, count=1)
    del model
    gc.collect()  # modules refer to one another
    torch.full((50_000,), 7.0, device=device)  # a copy that is under way would meet it
    torch.accelerator.synchronize()
    assert torch.accelerator.memory_allocated() == before
    assert (torch.nn.Module.__call__, torch.nn.Module._apply) == (call, apply)


def test_parking_gives_the_slots_back(device: torch.device) -> None:
    model = net()
    stream = residency.stream_frozen(model)
    expected = passes(model, device, count=1)
    before = torch.accelerator.memory_allocated()
    assert stream.statistics().here_bytes > 0
    freed = residency.park(model, gradients="drop")
    here = stream.statistics().here_bytes
    assert here == 0
    assert (
        before - torch.accelerator.memory_allocated() >= freed + 2 * stream.statistics().slot_bytes
    )
    residency.unpark(model)
    torch.manual_seed(3)
    again = passes(model, device, count=1)
    torch.manual_seed(3)
    assert all(map(torch.equal, again, passes(model, device, count=1)))
    assert len(expected) == len(again)
