"""What was parked comes back where it came from, on a device with no room to spare."""

from __future__ import annotations

import gc
import random

import pytest
import torch
from torch import Tensor, nn

import residency
from residency._units import MIB

pytestmark = [
    pytest.mark.sim,
    pytest.mark.sim_device(capacity="256MiB", schedule="eager", workspaces=False),
]
SIZES = (0.3, 1.5, 3, 5, 9, 11, 17)


def filled(device: torch.device, seed: int) -> tuple[nn.Module, list[Tensor]]:
    """Returns a module whose buffers lie among other tensors, on a device that is full."""
    chance = random.Random(seed)
    large = torch.empty(chance.randint(60, 180) * MIB, dtype=torch.uint8, device=device)
    del large  # one segment, which the next ones share
    model, others = nn.Module(), []
    try:
        while True:
            size = int(chance.choice(SIZES) * chance.uniform(0.6, 1.3) * MIB)
            tensor = torch.empty(size, dtype=torch.uint8, device=device)
            tensor[::4096] = (len(others) + size) % 251
            if chance.random() < 0.7:
                model.register_buffer(f"b{len(model._buffers)}", tensor)
            else:
                others.append(tensor)
    except torch.OutOfMemoryError:
        return model, others


def marks(model: nn.Module) -> list[list[int]]:
    return [buffer[::65536].tolist() for buffer in model.buffers()]


@pytest.mark.parametrize("seed", range(13))
def test_what_was_parked_fits_back_on_a_device_that_is_nearly_full(
    sim_device: torch.device, seed: int
) -> None:
    model, others = filled(sim_device, seed)
    before = marks(model)
    for need in (None, 40 * MIB):
        assert residency.park(model, need=need) > 0
        torch.accelerator.empty_cache()
        residency.unpark(model)
    with residency.hand_off(residency.memory_state().free, park=[model], timeout=0.1):
        residency.park(model)
        torch.accelerator.empty_cache()
    assert any(buffer.is_cpu for buffer in model.buffers())  # the block's own parking
    residency.unpark(model)
    assert all(buffer.device == sim_device for buffer in model.buffers())
    assert marks(model) == before
    del others


def test_runs_come_back_where_each_alone_would_ask_for_a_segment_that_is_too_large(
    sim_device: torch.device,
) -> None:
    others = [torch.empty(236 * MIB, dtype=torch.uint8, device=sim_device)]
    segment = torch.empty(20 * MIB, dtype=torch.uint8, device=sim_device)
    del segment  # which the next ones share; after 14 MiB of its own, 4 MiB would ask for 20
    model = nn.Module()
    for size in (14, 2, 4):
        others.append(torch.full((size * MIB,), size, dtype=torch.uint8, device=sim_device))
    model.register_buffer("last", others.pop())
    del others[2]
    model.register_buffer("first", others.pop())
    assert residency.park(model) == 18 * MIB
    torch.accelerator.empty_cache()
    assert residency.memory_state().free == 20 * MIB
    residency.unpark(model)
    assert all(buffer.device == sim_device for buffer in model.buffers())
    assert [int(b.cpu().unique()) for b in model.buffers()] == [4, 14]


def test_what_fits_comes_back_without_a_byte_of_the_cache_going_to_the_device(
    sim_device: torch.device,
) -> None:
    model = nn.Linear(1024, 1024).to(sim_device)
    residency.park(model)
    cached = torch.empty(64 * MIB, dtype=torch.uint8, device=sim_device)
    del cached
    before = torch.accelerator.memory_reserved()
    residency.unpark(model)
    assert torch.accelerator.memory_reserved() >= before
    assert all(p.device == sim_device for p in model.parameters())


def test_what_does_not_fit_is_told_in_bytes_and_by_its_reason(sim_device: torch.device) -> None:
    model = nn.Module()
    for number in range(10):
        data = torch.full((16 * MIB,), number, dtype=torch.uint8, device=sim_device)
        model.register_buffer(f"b{number}", data)
    del data
    gc.collect()
    with (  # noqa: PT012 - the block is what takes the room
        pytest.raises(residency.HandOffError, match=r"96\.00 MiB of 112\.00 MiB") as caught,
        residency.hand_off("200MiB", park=[model], timeout=0.05),
    ):
        large = torch.empty(192 * MIB, dtype=torch.uint8, device=sim_device)
        del large
        kept = [torch.empty(12 * MIB, dtype=torch.uint8, device=sim_device) for _ in range(16)]
        del kept[::2]  # as many bytes as were parked are free, in pieces that are too small
    assert "they are in pieces" in str(caught.value)
    assert sum(buffer.is_cpu for buffer in model.buffers()) == 7
    kept.clear()
    caught.value.retry()
    assert [int(b.cpu().unique()) for b in model.buffers()] == list(range(10))
    assert all(buffer.device == sim_device for buffer in model.buffers())
