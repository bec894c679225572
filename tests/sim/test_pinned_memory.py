"""Pinned memory: how it is rounded, kept for reuse and given back."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from residency import sim

MIB = 1 << 20

pytestmark = [
    pytest.mark.sim,
    pytest.mark.sim_device(capacity=64 * MIB, schedule="late", check_races=False),
]

accelerator = torch.accelerator


@pytest.fixture
def empty_host() -> Iterator[None]:
    accelerator.empty_host_cache()
    sim.reset_peak_pinned_memory_stats()
    assert sim.pinned_memory_stats()["pinned_bytes.current"] == 0
    yield
    accelerator.empty_host_cache()


@pytest.mark.parametrize(
    ("num_bytes", "pinned"), [(1, 1), (3, 4), (4096, 4096), (5000, 8192), (MIB + 1, 2 * MIB)]
)
def test_pinned_memory_rounds_up_to_a_power_of_two(
    empty_host: None, num_bytes: int, pinned: int
) -> None:
    tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    assert tensor.is_pinned()
    assert tensor.numel() == num_bytes
    stats = sim.pinned_memory_stats()
    assert stats["used_bytes.current"] == stats["pinned_bytes.peak"] == pinned


def test_freed_pinned_memory_is_reused_and_given_back_on_demand(empty_host: None) -> None:
    before = sim.pinned_memory_stats()["num_pinned"]
    for size in (8192, 5000, 8000):
        tensor = torch.empty(size, dtype=torch.uint8).pin_memory()
        del tensor
    stats = sim.pinned_memory_stats()
    assert stats["num_pinned"] == before + 1
    assert (stats["used_bytes.current"], stats["pinned_bytes.current"]) == (0, 8192)
    accelerator.empty_host_cache()
    assert sim.pinned_memory_stats()["pinned_bytes.current"] == 0


def test_pinned_memory_in_use_survives_emptying_the_host_cache(empty_host: None) -> None:
    tensor = torch.arange(1000).pin_memory()
    accelerator.empty_host_cache()
    assert sim.pinned_memory_stats()["pinned_bytes.current"] == 8192
    assert torch.equal(tensor, torch.arange(1000))


def test_pinned_memory_is_not_reused_under_a_copy_that_reads_it(empty_host: None) -> None:
    stream = torch.Stream(device="sim")
    target = torch.zeros(1024, device="sim")
    stream.wait_stream(accelerator.current_stream())
    host = torch.full((1024,), 3.0).pin_memory()
    address = host.data_ptr()
    with stream:
        target.copy_(host, non_blocking=True)
    del host
    other = torch.full((1024,), 4.0).pin_memory()
    assert other.data_ptr() != address
    stream.synchronize()
    assert target.sum().item() == 3.0 * 1024
    assert torch.empty(1024, pin_memory=True).data_ptr() == address


def test_no_more_memory_is_pinned_than_the_machine_has(empty_host: None) -> None:
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    largest = 1 << (physical.bit_length() - 1)
    sim.enable(dry=True)  # in which no page is committed
    held = torch.empty(largest, dtype=torch.uint8, pin_memory=True)
    sim.enable()
    before = sim.pinned_memory_stats()
    with pytest.raises(torch.AcceleratorError, match=r"^sim error: out of memory\nTried to page-"):
        torch.empty(largest, dtype=torch.uint8, pin_memory=True)
    assert sim.pinned_memory_stats() == before
    del held
    accelerator.empty_host_cache()
    with pytest.raises(torch.AcceleratorError, match="out of memory"):
        torch.empty(physical + 1, dtype=torch.uint8, pin_memory=True)
    assert torch.empty(MIB, dtype=torch.uint8, pin_memory=True).is_pinned()


def test_a_pinned_tensor_is_pinned_everywhere_and_a_pageable_one_nowhere(empty_host: None) -> None:
    pinned, pageable = torch.zeros(1000).pin_memory(), torch.zeros(1000)
    assert pinned[500:].is_pinned()
    assert pinned.pin_memory() is pinned
    assert not pageable.is_pinned()
    address = pinned.data_ptr()
    del pinned
    assert address
    assert not torch.zeros(1000).is_pinned()


def test_a_device_tensor_cannot_be_pinned() -> None:
    with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
        torch.empty(5, device="sim", pin_memory=True)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_data_loader_pins_its_batches(empty_host: None, num_workers: int) -> None:
    dataset = torch.utils.data.TensorDataset(torch.arange(32.0), torch.arange(32))
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=8, pin_memory=True, num_workers=num_workers
    )
    seen = []
    for values, labels in loader:
        assert values.is_pinned()
        assert labels.is_pinned()
        seen.append(values.to("sim", non_blocking=True))
    assert torch.equal(torch.cat(seen).cpu(), torch.arange(32.0))
