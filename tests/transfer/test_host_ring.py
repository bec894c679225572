"""The ring through which device tensors go to the host: their bytes, and when they are read."""

from __future__ import annotations

import gc
from unittest import mock

import pytest
import torch

import residency
from residency import _device, _pinned
from residency._transfer import HostRing, _host_ring, gate_of, lanes_of
from residency._transfer._slab import Slab

SLOT = 4096


def small_ring(num_slots: int = 2) -> HostRing:
    return HostRing(num_bytes=num_slots * SLOT, num_slots=num_slots)


def values(device: torch.device, num_values: int) -> torch.Tensor:
    """Different values, which the device writes when something makes it."""
    return torch.zeros(num_values, device=device).add_(torch.arange(num_values, device=device) + 1)


@pytest.mark.parametrize("size", [0, 1, SLOT // 4 - 1, SLOT // 4, SLOT, 5 * SLOT + 3])
def test_bytes_are_read_when_they_are_there(device, size):
    ring = small_ring()
    tensor = values(device, size)
    carried = ring.carry([tensor])
    expected = tensor.cpu()
    del tensor
    carried.wait()
    carried.wait()
    assert torch.equal(carried.tensors[0], expected)
    assert not carried.tensors[0].is_pinned()


def test_a_slot_is_filled_anew_when_it_was_read(device, monkeypatch):
    arrive = _host_ring._Outgoing.arrive

    def late(source, start, data):
        torch.accelerator.synchronize()  # what the lane may do by now is done
        arrive(source, start, data)

    monkeypatch.setattr(_host_ring._Outgoing, "arrive", late)
    ring = small_ring()
    expected, all_carried = [], []
    for number in range(6):
        tensors = [values(device, n) + number for n in (700, 3, 2100)]
        all_carried.append(ring.carry(tensors))
        expected.append([tensor.cpu() for tensor in tensors])
        del tensors
        if number:
            all_carried[-2].wait()
    for carried, values_then in zip(reversed(all_carried), reversed(expected), strict=True):
        carried.wait()  # the newest first, and with it all
        assert all(map(torch.equal, carried.tensors, values_then))


@pytest.mark.sim  # a real device may be done by then
def test_the_lane_copies_while_the_host_goes_on(device):
    ring = small_ring(num_slots=4)
    tensors = [values(device, 8), values(device, 9 * SLOT)]
    tensors[0].add_(1)
    before = lanes_of(device).mark(_device.current_stream(device))
    carried = ring.carry(tensors)
    assert not before.query()  # nothing has forced the device to do even what came before
    carried.wait()
    assert before.query()


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.view(8, 16, 4).transpose(0, 2),
        lambda x: x.view(8, 64)[:, 3:9],
        lambda x: x[:1].expand(7, 1),
        lambda x: x.bool(),
        lambda x: x.bfloat16(),
        lambda x: torch.complex(x, -x).conj(),
        lambda x: torch.complex(x, -x).conj().imag,
        lambda x: x.to(torch.float8_e4m3fn),
        lambda x: x.sum(),
    ],
)
def test_strides_and_dtypes_come_along(device, make):
    tensor = make(values(device, 512))
    carried = small_ring().carry([tensor])
    carried.wait()
    [found] = carried.tensors
    expected = tensor.cpu()
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    if tensor.is_contiguous() or tensor.transpose(0, -1).is_contiguous():
        assert found.stride() == tensor.stride()
    raw = [
        t.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
        for t in (found, expected)
    ]
    assert torch.equal(*raw)


def test_what_others_may_write_is_copied_as_it_is_at_the_call(device):
    ring = small_ring()
    batch = values(device, 3000)
    host = torch.arange(5)
    with torch.inference_mode():
        inferred = values(device, 16)
    carried = ring.carry([batch[:2000], batch.detach(), host, inferred])
    batch.fill_(0)
    host.fill_(0)
    inferred_then = inferred.clone()
    with torch.inference_mode():
        inferred.fill_(0)
    carried.wait()
    expected = values(torch.device("cpu"), 3000)
    assert torch.equal(carried.tensors[0], expected[:2000])
    assert torch.equal(carried.tensors[1], expected)
    assert torch.equal(carried.tensors[2], torch.arange(5))
    assert torch.equal(carried.tensors[3], inferred_then.cpu())


@pytest.mark.sim_device(check_races=False)  # which finds it, too
def test_a_tensor_that_its_only_owner_writes_too_early_is_an_error(device):
    ring = small_ring()
    tensor = values(device, 9 * SLOT)
    carried = ring.carry([tensor])
    with residency.mutating(tensor):  # which waits for what is queued; that is not all of it
        tensor.add_(1)
    with pytest.raises(residency.RefusedError, match=r"written in place .*clone"):
        carried.wait()
    carried = ring.carry([tensor])  # the ring is whole
    carried.wait()
    assert torch.equal(carried.tensors[0], tensor.cpu())


def test_no_more_of_the_device_than_what_is_carried_and_nothing_once_it_is_there(device):
    ring = small_ring()
    num_bytes = 64 * SLOT
    before = _device.memory_allocated(device)
    tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    _device.reset_peak(device)
    carried = ring.carry([tensor])
    del tensor
    assert _device.max_memory_allocated(device) == before + num_bytes
    carried.wait()
    assert _device.memory_allocated(device) == before
    assert not len(gate_of(device))


def test_of_a_storage_of_which_a_part_is_wanted_the_rest_does_not_stay(device):
    before = _device.memory_allocated(device)
    part = torch.zeros(64 * SLOT, dtype=torch.uint8, device=device)[:SLOT].detach()
    carried = small_ring().carry([part])
    del part
    assert _device.memory_allocated(device) == before + SLOT
    carried.wait()
    assert _device.memory_allocated(device) == before


def test_a_ring_that_is_left_alone_lets_go_behind_its_copies(device):
    before = _device.memory_allocated(device)
    ring = small_ring()
    ring.carry([values(device, 9 * SLOT)])
    assert len(gate_of(device))
    del ring
    gc.collect()
    assert not len(gate_of(device))
    torch.full((9 * SLOT,), 7.0, device=device)  # the memory that the lane has read
    torch.accelerator.synchronize()
    assert _device.memory_allocated(device) == before


def test_writers_that_pass_the_gate_wait_for_the_ring(device):
    ring = small_ring(num_slots=4)
    tensor = values(device, 64)
    ring.carry([tensor])
    assert gate_of(device).sources_of([tensor.untyped_storage().data_ptr()])
    assert len(gate_of(device)) == 1
    lanes_of(device).d2h.synchronize()  # the ring goes


def test_where_memory_cannot_be_locked_the_ring_is_pageable_and_says_so(device, caplog):
    tensor = values(device, 9 * SLOT)
    refusing = mock.patch.object(_pinned, "allocate_pinned", side_effect=RuntimeError("no more"))
    with refusing, caplog.at_level("WARNING", "residency"):
        carried = small_ring().carry([tensor])
    [record] = caplog.records
    assert "8.00 KiB of host memory could not be page-locked (no more)" in record.getMessage()
    caplog.clear()
    carried.wait()
    assert torch.equal(carried.tensors[0], tensor.cpu())


def test_on_the_host_alone_no_ring_is_made():
    ring = small_ring()
    with mock.patch.object(Slab, "__init__", side_effect=AssertionError("it is made")):
        carried = ring.carry([torch.arange(3)])
    carried.wait()
    assert carried.tensors[0].tolist() == [0, 1, 2]


def test_what_has_no_plain_bytes_is_not_taken(device):
    class Kind(torch.Tensor):
        pass

    plain = torch.zeros(3, device=device)
    assert HostRing.takes(plain)
    assert HostRing.takes(torch.nn.Parameter(plain))
    for odd in (None, 3, plain.as_subclass(Kind), torch.eye(3).to_sparse(), plain.to("meta")):
        assert not HostRing.takes(odd)
