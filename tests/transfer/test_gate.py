"""The gate: whoever writes or frees device storage waits for the lanes that still read it."""

import torch

import residency
from residency import _device
from residency._transfer import Gate, SlabArena, copy_to_host, gate_of, lanes_of

COUNT = 4096


def home(arena):
    region = arena.allocate(4 * COUNT)
    return region, arena.tensor(region, torch.float32, (COUNT,), (1,))


def test_a_copy_has_the_bytes_of_the_moment_of_the_call(device):
    lanes, gate, arena = lanes_of(device), gate_of(device), SlabArena()
    tensor = torch.full((COUNT,), 1.0, device=device)
    region, copied = home(arena)
    event = copy_to_host([tensor], [region], lanes=lanes, gate=gate)
    gate.before_write([tensor])
    tensor.fill_(2.0)
    event.synchronize()
    assert torch.equal(copied, torch.ones(COUNT))
    gate.before_free([tensor])


def test_an_optimizer_step_waits_for_a_lane_that_still_reads_its_parameters(device):
    lanes, gate, arena = lanes_of(device), gate_of(device), SlabArena()
    parameter = torch.nn.Parameter(torch.full((COUNT,), 1.0, device=device))
    optimizer = residency.offload_optimizer(torch.optim.AdamW([parameter], lr=0.5), bucket=4096)
    for _ in range(3):
        expected = parameter.detach().cpu().clone()
        region, copied = home(arena)
        event = copy_to_host([parameter], [region], lanes=lanes, gate=gate)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        event.synchronize()
        assert torch.equal(copied, expected)
    assert not torch.equal(parameter.detach().cpu(), expected)


def test_memory_is_given_back_only_behind_its_readers(device):
    lanes, gate, arena = lanes_of(device), gate_of(device), SlabArena()
    tensor = torch.full((COUNT,), 1.0, device=device)
    region, copied = home(arena)
    event = copy_to_host([tensor], [region], lanes=lanes, gate=gate)
    gate.before_free([tensor])
    del tensor
    torch.full((COUNT,), 9.0, device=device)
    event.synchronize()
    assert torch.equal(copied, torch.ones(COUNT))


def test_a_tensor_that_is_not_dense_is_copied_in_its_logical_order(device):
    lanes, gate, arena = lanes_of(device), gate_of(device), SlabArena()
    tensor = torch.arange(2.0 * COUNT, device=device)[::2]
    region, copied = home(arena)
    copy_to_host([tensor], [region], lanes=lanes, gate=gate).synchronize()
    assert torch.equal(copied, torch.arange(0, 2.0 * COUNT, 2))


def test_the_gate_keeps_one_entry_per_storage_and_lane(device):
    lanes, gate = lanes_of(device), Gate(device)
    tensor = torch.ones(8, device=device)
    for lane in (lanes.h2d, lanes.d2h, lanes.d2h, lanes.d2h):
        gate.reading([tensor, tensor[2:4]], lanes.mark(lane), lane)
    assert len(gate) == 2
    gate.before_free([tensor[:1]])
    assert len(gate) == 0


def test_the_gate_forgets_reads_that_are_over(device):
    lanes, gate = lanes_of(device), Gate(device)
    tensors = [torch.ones(8, device=device) for _ in range(600)]
    for tensor in tensors:
        gate.reading([tensor], lanes.mark(lanes.d2h), lanes.d2h)
        _device.synchronize(device)
    assert len(gate) < 300
