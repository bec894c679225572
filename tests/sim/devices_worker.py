"""Cases of tests/sim/test_contexts.py in which a process sees two devices: which one is current, on
which it has a context, and that the library makes none on another than its tensors'.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from context_cases import CAPACITY, CONTEXT, cases_of, has_context, run_all, starts_nothing
from torch import nn
from worker_cases import on_thread

import residency
from residency import _device, sim

case = cases_of(2)


@case
def devices_are_counted_without_a_start() -> None:
    starts_nothing(lambda: (torch.cuda.device_count(), residency.memory_state("cuda:1")))
    assert torch.cuda.device_count() == torch.accelerator.device_count() == 2
    with pytest.raises(residency.InvalidArgumentError, match="this machine has 2"):
        residency.memory_state("cuda:2")


@case
def a_thread_begins_on_the_first_device() -> None:
    torch.cuda.set_device(1)
    seen: list[int] = []
    on_thread(lambda: seen.append(torch.cuda.current_device()))
    assert (seen, torch.cuda.current_device()) == ([0], 1)
    assert torch.ones(2, device="cuda").device.index == 1


@case
def to_choose_a_device_makes_a_context_on_it() -> None:
    torch.cuda.set_device(0)  # the thread's already
    assert not has_context(0)
    torch.cuda.set_device(1)
    assert (has_context(0), has_context(1)) == (False, True)


@case
def a_guard_makes_none_on_the_device_that_it_goes_back_to() -> None:
    with torch.cuda.device(1):
        assert torch.cuda.current_device() == 1
        tensor = torch.ones(2, device="cuda")
    assert torch.cuda.current_device() == 0
    assert (tensor + tensor).sum().item() == 4
    assert (has_context(0), has_context(1)) == (False, True)


@case
def to_choose_again_what_a_guard_went_back_to_makes_a_context_on_it() -> None:
    with torch.cuda.device(1):  # as work on another device than the thread's is done
        torch.ones(2, device="cuda")
    assert not has_context(0)
    with torch.cuda.device(0):  # "always initializes": ExchangeDevice, c10/cuda/CUDAFunctions.cpp
        assert has_context(0)


@case
def an_event_that_ends_on_a_thread_of_another_device_makes_a_context_there() -> None:
    torch.cuda.set_device(1)
    events = [torch.Event("cuda")]
    events[0].record()
    torch.cuda.synchronize()
    assert not has_context(0)
    on_thread(events.clear)
    assert has_context(0)


@case
def page_locked_memory_makes_no_context_beside_another() -> None:
    torch.cuda.set_device(1)
    on_thread(lambda: torch.empty(10, pin_memory=True))
    assert not has_context(0)


@case
def a_step_on_the_second_device_leaves_the_first_alone() -> None:
    torch.cuda.set_device(1)
    model = nn.Linear(32, 32, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 32, device="cuda")).sum().backward()
    optimizer.step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated(1) > 0
    assert torch.cuda.memory_allocated(0) == 0
    assert not has_context(0)
    assert torch.cuda.mem_get_info(0) == (CAPACITY - CONTEXT, CAPACITY)
    assert has_context(0)  # that question made it


@case
def tensors_are_on_one_of_the_devices() -> None:
    torch.ones(2, device="cuda:1")
    with pytest.raises(RuntimeError, match=r"cuda:1 here, .* found cuda:0"):
        torch.ones(2, device="cuda:0")
    with pytest.raises(RuntimeError, match=r"cuda:1 here, .* found cuda:0"):
        torch.cuda.Stream(0)


@case
def a_device_that_is_not_there_is_cudas_error() -> None:
    torch.cuda.init()
    with pytest.raises(torch.AcceleratorError, match="CUDA error: invalid device ordinal"):
        torch.cuda.set_device(2)
    with pytest.raises(torch.AcceleratorError, match="CUDA error: invalid device ordinal"):
        torch.ones(2, device="cuda:2")
    with pytest.raises(torch.AcceleratorError, match="CUDA error: invalid device ordinal"):
        torch.cuda.mem_get_info(2)
    for ask in (torch.cuda.memory_allocated, torch.cuda.memory_stats):
        with pytest.raises(RuntimeError, match="Invalid device argument 2: did you call init"):
            ask(2)


@case
def the_number_of_devices_stays() -> None:
    assert sim.settings()["devices"] == 2
    sim.enable(CAPACITY)
    with pytest.raises(residency.sim.SimulatorError, match="devices is 1, and this process has 2"):
        sim.enable(CAPACITY, devices=1)


@case
def saves_of_the_second_device_leave_the_first_alone() -> None:
    torch.cuda.set_device(1)
    model = nn.Linear(256, 256, device="cuda")
    optimizer = residency.offload_optimizer(torch.optim.AdamW(model.parameters()))
    state = {"model": model, "optimizer": optimizer}
    with tempfile.TemporaryDirectory() as folder:
        with residency.Checkpointer(folder) as checkpointer:
            for step in range(3):
                model(torch.ones(2, 256, device="cuda")).sum().backward()
                optimizer.step()
                checkpointer.save(step, state)
            checkpointer.restore(state)
        assert not has_context(0)
    residency.snapshot(state).wait()
    residency.onload_optimizer(optimizer)
    torch.cuda.synchronize()
    assert not has_context(0)


@case
def a_parked_model_of_the_second_device_leaves_the_first_alone() -> None:
    torch.cuda.set_device(1)
    model = nn.Linear(256, 256, device="cuda")
    residency.park(model)
    residency.memory_state()
    residency.unpark(model)
    model(torch.ones(2, 256, device="cuda")).sum().item()
    assert not has_context(0)


def leaves_the_first_alone(call: Callable[[], object]) -> Any:
    """Runs a call for what is on the second device where the first is the thread's."""
    assert torch.cuda.current_device() == 0
    result = call()
    assert torch.cuda.current_device() == 0
    assert (has_context(0), has_context(1)) == (False, True)
    return result


def trained_on_the_second() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(256, 256, device="cuda:1")
    model(torch.ones(2, 256, device="cuda:1")).sum().backward()
    return model, torch.optim.AdamW(model.parameters())


@case
def a_step_of_another_device_than_the_threads_leaves_that_alone() -> None:
    model, optimizer = trained_on_the_second()
    expected, plain = trained_on_the_second()
    expected.load_state_dict(model.state_dict())
    leaves_the_first_alone(lambda: residency.offload_optimizer(optimizer))
    for _ in range(2):
        for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
            other.grad = parameter.grad.clone()
        plain.step()
        leaves_the_first_alone(optimizer.step)
    leaves_the_first_alone(lambda: residency.onload_optimizer(optimizer))
    leaves_the_first_alone(optimizer.step)
    plain.step()
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    assert all(torch.equal(parameter, other) for parameter, other in pairs)


@case
def a_save_of_another_device_than_the_threads_leaves_that_alone() -> None:
    model, optimizer = trained_on_the_second()
    residency.offload_optimizer(optimizer)
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with tempfile.TemporaryDirectory() as folder:
        checkpointer = leaves_the_first_alone(lambda: residency.Checkpointer(folder))
        leaves_the_first_alone(lambda: checkpointer.prepare(state))
        leaves_the_first_alone(lambda: checkpointer.save(1, state).wait())
        leaves_the_first_alone(optimizer.step)
        leaves_the_first_alone(lambda: checkpointer.restore(state))
        assert all(torch.equal(kept[name], each) for name, each in model.state_dict().items())
        leaves_the_first_alone(checkpointer.close)


@case
def a_snapshot_of_another_device_than_the_threads_leaves_that_alone() -> None:
    model, _ = trained_on_the_second()
    taken = leaves_the_first_alone(lambda: residency.snapshot({"model": model}))
    leaves_the_first_alone(taken.wait)


@case
def parking_from_another_device_than_the_threads_leaves_that_alone() -> None:
    model, _ = trained_on_the_second()
    leaves_the_first_alone(lambda: residency.park(model))
    leaves_the_first_alone(lambda: residency.unpark(model))
    assert {parameter.device.index for parameter in model.parameters()} == {1}


@case
def a_hand_off_from_another_device_than_the_threads_leaves_that_alone() -> None:
    model, _ = trained_on_the_second()

    def run() -> None:
        with residency.hand_off(CAPACITY - CONTEXT, park=[model], device="cuda:1"):
            assert torch.cuda.memory_reserved(1) == 0

    leaves_the_first_alone(run)


@case
def what_is_queued_on_another_device_than_the_threads_is_waited_for() -> None:
    numbers = torch.arange(1000.0)
    for index in (None, 1):
        source = numbers.to("cuda:1")
        target = torch.empty(1000, pin_memory=True)
        target.copy_(source, non_blocking=True)
        device = None if index is None else torch.device("cuda", index)
        leaves_the_first_alone(lambda device=device: _device.synchronize(device))
        assert torch.equal(target, numbers), index


@case
def figures_of_another_device_than_the_threads_leave_that_alone() -> None:
    model = nn.Linear(256, 256, device="cuda:1")
    state = leaves_the_first_alone(lambda: residency.memory_state("cuda:1"))
    assert (state.outside, state.capacity) == (CONTEXT, CAPACITY)
    leaves_the_first_alone(lambda: residency.memory_state())
    leaves_the_first_alone(residency.holders)
    del model


@case
def a_graph_of_the_second_device_is_captured_and_replayed() -> None:
    torch.cuda.set_device(1)
    graph, source = torch.cuda.CUDAGraph(), torch.ones(4, device="cuda")
    with torch.cuda.graph(graph):
        result = source * 2
    source.fill_(3)
    graph.replay()
    assert result.tolist() == [6.0] * 4
    assert {s["device"] for s in torch.cuda.memory_snapshot()} == {1}
    assert not has_context(0)


@case
def a_snapshot_of_the_allocator_names_the_second_device() -> None:
    torch.cuda.set_device(1)
    torch.cuda.memory._record_memory_history()
    kept = torch.ones(4, device="cuda")
    shown = torch.cuda.memory._snapshot()
    assert [len(trace) > 0 for trace in shown["device_traces"]] == [False, True]
    assert {segment["device"] for segment in shown["segments"]} == {1}
    figures = torch.cuda.memory_stats(0)
    assert figures["reserved_bytes.all.current"] == 0
    assert not has_context(0)
    with pytest.raises(torch.OutOfMemoryError, match="GPU 1 has a total capacity"):
        torch.empty(2 * CAPACITY, dtype=torch.uint8, device="cuda")
    del kept


if __name__ == "__main__":
    run_all()
