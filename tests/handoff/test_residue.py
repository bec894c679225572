"""What no tensor accounts for is named, with its bytes where something tells them."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import distributed_c10d

from residency import HandOffError, _device, _private_pools, hand_off
from residency._handoff._residue import residue_lines
from residency._memory._state import measure

MIB = 1 << 20


def lines(device: torch.device) -> str:
    return "\n".join(residue_lines(device, measure(device)))


@pytest.mark.sim_device(context="0B")
def test_a_device_of_which_torch_knows_all_has_no_residue(device: torch.device) -> None:
    if measure(device).outside:
        pytest.skip("a real device has a context")
    kept = torch.ones(MIB, device=device)
    assert lines(device) == ""
    del kept


@pytest.mark.sim
def test_private_pools_are_named_with_their_bytes(device: torch.device) -> None:
    module = torch.get_device_module(device)
    pool = module.MemPool()
    with module.use_mem_pool(pool):
        captured = torch.ones(4 * MIB, dtype=torch.uint8, device=device)
    reserved = _private_pools.reserved_bytes(device, _device.allocator_figures(device))
    assert reserved >= 4 * MIB
    assert "reserved by private pools" in lines(device)
    with pytest.raises(HandOffError, match="reserved by private pools"), hand_off(2**50):
        pytest.fail("the body must not run")
    del captured, pool


def test_what_the_driver_charges_is_told_apart_from_other_processes(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = torch.ones(MIB, device=device)
    reserved = measure(device).reserved
    monkeypatch.setattr(_device, "charged_bytes", lambda _: reserved + 300 * MIB)
    found = lines(device)
    assert "300.00 MiB  charged to this process beyond torch's allocator: its context" in found
    assert "charged to other processes" in found
    # A driver that charges less than torch reserves, as one does between two of its own looks.
    monkeypatch.setattr(_device, "charged_bytes", lambda _: reserved - 1)
    assert " 0 B  charged to this process beyond torch's allocator" in lines(device)
    del kept


def test_process_groups_that_have_memory_on_the_device_are_counted(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = {"first": "cuda:nccl", "second": "cpu:gloo,cuda:nccl", "third": "cpu:gloo"}
    for group, backend in groups.items():  # as torch registers groups
        monkeypatch.setitem(distributed_c10d._world.pg_map, group, (backend, None))
    monkeypatch.setattr(_device, "charged_bytes", lambda _: 300 * MIB)
    assert "its context, 2 communicators of process groups" in lines(device)


def test_what_nobody_tells_apart_is_named_as_one(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = torch.ones(MIB, device=device)
    room = _device.device_room(device)
    assert room is not None
    monkeypatch.setattr(_device, "device_room", lambda _: (room[0] - 500 * MIB, room[1]))
    monkeypatch.setattr(_device, "charged_bytes", lambda _: None)
    assert "outside: other processes, and this one's context" in lines(device)
    del kept
