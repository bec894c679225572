"""The gate: whoever writes or frees device storage waits for the lanes that still read it."""

import sys
import threading

import torch

import residency
from residency import _device
from residency._transfer import Gate, Mover, SlabArena, gate_of, lanes_of

COUNT = 4096


def copied_from(tensor):
    """Returns a host tensor, and the flight that brings it the values of this moment."""
    arena = SlabArena()
    region = arena.allocate(4 * COUNT)
    target = arena.tensor(region, torch.float32, (COUNT,), (1,))
    mover = Mover(tensor.device)
    mover.follow_to_host()
    return target, mover.to_host([(target, tensor.detach())], [tensor])


def test_a_copy_has_the_bytes_of_the_moment_of_the_call(device):
    gate = gate_of(device)
    tensor = torch.full((COUNT,), 1.0, device=device)
    copied, flight = copied_from(tensor)
    gate.before_write([tensor])
    tensor.fill_(2.0)
    flight.wait()
    assert torch.equal(copied, torch.ones(COUNT))
    gate.before_free([tensor])


def test_an_optimizer_step_waits_for_a_lane_that_still_reads_its_parameters(device):
    parameter = torch.nn.Parameter(torch.full((COUNT,), 1.0, device=device))
    optimizer = residency.offload_optimizer(torch.optim.AdamW([parameter], lr=0.5), bucket=4096)
    for _ in range(3):
        expected = parameter.detach().cpu().clone()
        copied, flight = copied_from(parameter)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        flight.wait()
        assert torch.equal(copied, expected)
    assert not torch.equal(parameter.detach().cpu(), expected)


def test_memory_is_given_back_only_behind_its_readers(device):
    gate = gate_of(device)
    tensor = torch.full((COUNT,), 1.0, device=device)
    copied, flight = copied_from(tensor)
    gate.before_free([tensor])
    del tensor
    torch.full((COUNT,), 9.0, device=device)
    flight.wait()
    assert torch.equal(copied, torch.ones(COUNT))


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


class Writer:
    """A stream that notes what it is made to wait for."""

    def __init__(self):
        self.device = torch.accelerator.current_accelerator()
        self.events = []

    def wait_event(self, event):
        self.events.append(event)


def waits_before(gate, *tensors):
    writer = Writer()
    gate.before_write(tensors, stream=writer)
    return writer.events


def test_a_writer_waits_for_the_newest_read_of_a_lane_alone(device):
    lanes, gate = lanes_of(device), Gate(device)
    one, two, three = (torch.ones(8, device=device) for _ in range(3))
    marks = [lanes.mark(lanes.d2h) for _ in range(3)]
    reads = [
        gate.reading(tensors, mark, lanes.d2h)
        for tensors, mark in zip(([one, two], [two, three], [three]), marks, strict=True)
    ]
    assert waits_before(gate, one) == [marks[0]]
    assert waits_before(gate, one, two) == [marks[1]]
    assert waits_before(gate, one, two, three) == [marks[2]]
    reads[2].end()
    assert waits_before(gate, one, two, three) == [marks[1]]
    assert len(gate) == 2
    gate.before_free([two])
    assert waits_before(gate, two) == []
    reads[0].end()
    assert len(gate) == 0


def test_a_read_of_another_thread_is_waited_for_beside(device):
    """Which of two threads' events comes first on the lane is not known."""
    lanes, gate = lanes_of(device), Gate(device)
    tensor, first = torch.ones(8, device=device), lanes.mark(lanes.d2h)
    second = lanes.mark(lanes.d2h)
    thread = threading.Thread(target=gate.reading, args=([tensor], second, lanes.d2h))
    thread.start()
    thread.join()
    gate.reading([tensor], first, lanes.d2h)
    assert set(waits_before(gate, tensor)) == {first, second}


def test_threads_pass_the_gate_at_once(device):
    lanes, gate, errors = lanes_of(device), Gate(device), []
    shared = [torch.ones(8, device=device) for _ in range(20)]
    before = sys.getswitchinterval()

    class Unfinished(torch.Event):
        def query(self):
            return False

    def pass_often(number):
        try:
            for index in range(300):
                own = torch.ones(8, device=device)
                tensors = [own, *shared[number : number + 10]]
                event = Unfinished(device.type)
                read = gate.reading(tensors, event, lanes.d2h)
                assert event in waits_before(gate, *tensors)
                gate.before_free([own])
                assert event not in waits_before(gate, own)
                assert event in waits_before(gate, *shared)
                if index % 3:
                    read.end()
                    assert event not in waits_before(gate, *tensors)
            read.end()
        except BaseException as error:
            errors.append(repr(error))

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=pass_often, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert errors == []
    assert len(gate) == 0
