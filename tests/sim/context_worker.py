"""Cases of tests/sim/test_contexts.py: what makes a context on the device, and what it takes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

import pytest
import torch
from context_cases import (
    CAPACITY,
    CONTEXT,
    MIB,
    cases_of,
    has_context,
    in_child,
    run_all,
    starts_nothing,
    use,
)
from torch import nn

import residency
from residency import _device, sim

case = cases_of(1)

# ------------------------------------------------------------------------------------ the simulator


@case
def counting_starts_nothing() -> None:
    starts_nothing(lambda: (torch.cuda.device_count(), torch.accelerator.device_count()))
    assert torch.cuda.device_count() == 1


@case
def figures_of_torch_start_nothing() -> None:
    assert torch.cuda.memory_stats() == {}
    starts_nothing(lambda: (torch.cuda.memory_allocated(), torch.ones(2).is_pinned()))


@case
def a_seed_waits_for_the_device() -> None:
    starts_nothing(lambda: torch.manual_seed(3))


@case
def settings_change_without_a_context() -> None:
    starts_nothing(lambda: sim.enable(2 * CAPACITY, schedule="eager"))
    assert torch.cuda.get_device_properties(0).total_memory == 2 * CAPACITY
    assert not has_context()


@case
def asking_whether_cuda_is_available_poisons_forks() -> None:
    assert torch.cuda.is_available()
    assert not torch.cuda.is_initialized()
    assert not has_context()
    assert "Cannot re-initialize CUDA in forked subprocess" in in_child(use)


@case
def asking_nvml_whether_cuda_is_available_does_not() -> None:
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    assert torch.cuda.is_available()
    assert in_child(use) == "passed"


@case
def initialising_makes_no_context_and_poisons_forks() -> None:
    assert torch.accelerator.current_device_index() == 0
    assert torch.cuda.is_initialized()
    torch.cuda.get_device_properties(0)
    torch.cuda.set_device(0)
    assert torch.cuda.memory_stats()["reserved_bytes.all.current"] == 0
    assert not has_context()
    assert "Cannot re-initialize CUDA in forked subprocess" in in_child(use)


@case
def what_uses_the_device_makes_a_context() -> None:
    def makes(use: Callable[[], object]) -> None:
        assert not has_context()
        use()
        assert has_context()
        assert torch.cuda.mem_get_info()[1] == CAPACITY

    calls: dict[str, Callable[[], object]] = {
        "a tensor": lambda: torch.empty(1, device="cuda"),
        "page-locked memory": lambda: torch.empty(1, pin_memory=True),
        "free bytes": torch.cuda.mem_get_info,
        "a stream": torch.cuda.Stream,
        "an event": lambda: torch.cuda.Event().record(),
        "a wait": torch.cuda.synchronize,
        "what memory is, once initialised": lambda: torch.cuda.init() or torch.ones(1).is_pinned(),
    }
    for name, call in calls.items():
        outcome = in_child(lambda call=call: makes(call))
        assert outcome == "passed", (name, outcome)


@case
def a_context_takes_its_bytes() -> None:
    assert torch.cuda.mem_get_info() == (CAPACITY - CONTEXT, CAPACITY)
    room = CAPACITY - CONTEXT
    kept = torch.empty(room, dtype=torch.uint8, device="cuda")
    assert torch.cuda.mem_get_info() == (0, CAPACITY)
    with pytest.raises(torch.OutOfMemoryError, match=r"of 1024\.00 MiB of which 0 bytes is"):
        torch.empty(1, device="cuda")
    del kept
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info() == (room, CAPACITY)
    state = residency.memory_state()
    assert (state.outside, state.free, state.capacity) == (CONTEXT, room, CAPACITY)


@case
def a_context_can_be_of_another_size_and_none() -> None:
    assert sim.settings()["context"] == CONTEXT
    sim.enable(CAPACITY, context="24MiB")
    assert torch.cuda.mem_get_info() == (1000 * MIB, CAPACITY)
    kept = torch.empty(900 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(
        residency.InvalidArgumentError,
        match=r"900\.00 MiB are in use beside a context of 125\.00 MiB",
    ):
        sim.enable(CAPACITY, context="125MiB")
    assert torch.cuda.mem_get_info()[0] == 100 * MIB  # the refused call changed nothing
    sim.enable(CAPACITY, context="0B")
    assert torch.cuda.mem_get_info()[0] == 124 * MIB
    del kept


# ------------------------------------------------------------------------------------- the library


@case
def memory_figures_start_nothing() -> None:
    starts_nothing(lambda: (residency.memory_state(), residency.holders()))
    assert residency.memory_state().notes


@case
def memory_figures_make_no_context_where_torch_is_initialised() -> None:
    torch.cuda.init()
    residency.memory_state()
    with residency.phase("load"):
        pass
    assert not has_context()


@case
def phases_start_nothing() -> None:
    def run() -> None:
        with residency.phase("load"):
            pass

    starts_nothing(run)


@case
def whether_memory_can_be_page_locked_starts_nothing() -> None:
    starts_nothing(_device.is_pinning_available)
    assert _device.is_pinning_available()
    assert _device.accelerator() == torch.device("cuda", 0)


@case
def a_recording_of_host_data_starts_nothing() -> None:
    def run() -> None:
        with tempfile.TemporaryDirectory() as folder, residency.record(f"{folder}/run.jsonl"):
            torch.save({"x": torch.ones(3)}, f"{folder}/x.pt")
            torch.load(f"{folder}/x.pt")

    starts_nothing(run)


def save_and_restore(state: dict[str, object]) -> None:
    with tempfile.TemporaryDirectory() as folder, residency.Checkpointer(folder) as checkpointer:
        checkpointer.prepare(state)
        assert checkpointer.save(1, state).wait().statistics().pinned_bytes == 0
        checkpointer.restore(state)


@case
def a_model_on_the_host_is_saved_and_restored_without_a_start() -> None:
    starts_nothing(lambda: save_and_restore({"model": nn.Linear(64, 64), "x": torch.ones(3)}))


@case
def a_run_on_the_host_is_saved_and_restored_without_a_context() -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()  # asks the current stream whether it is captured, which initialises CUDA
    save_and_restore({"model": model, "optimizer": optimizer})
    residency.snapshot({"model": model, "optimizer": optimizer}).wait()
    assert not has_context()


@case
def a_snapshot_of_host_tensors_is_not_page_locked() -> None:
    def run() -> None:
        taken = residency.snapshot({"x": torch.arange(5000)})
        taken.wait()
        assert torch.equal(taken.tree["x"], torch.arange(5000))

    starts_nothing(run)
    use()
    taken = residency.snapshot({"x": torch.arange(5000)})  # nor where there is a context
    assert not taken.tree["x"].is_pinned()
    assert residency.snapshot({"x": torch.arange(5000).cuda()}).tree["x"].is_pinned()


@case
def a_model_that_moves_to_the_device_is_page_locked_from_then_on() -> None:
    model = nn.Linear(256, 256)
    with (
        tempfile.TemporaryDirectory() as folder,
        residency.Checkpointer(folder) as checkpointer,
    ):
        assert checkpointer.save(1, {"model": model}).wait().statistics().pinned_bytes == 0
        model.to("cuda")
        assert checkpointer.save(2, {"model": model}).wait().statistics().pinned_bytes > 0


@case
def the_random_state_of_a_device_that_is_not_used_yet_is_set_when_it_is() -> None:
    drawn: dict[str, torch.Tensor] = {}
    with tempfile.TemporaryDirectory() as folder:

        def on_device() -> None:
            torch.cuda.manual_seed(11)
            torch.rand(3, device="cuda")
            with residency.Checkpointer(f"{folder}/run") as checkpointer:
                checkpointer.save(1, {"x": torch.ones(1)}).wait()
            torch.save(torch.rand(5, device="cuda").cpu(), f"{folder}/drawn.pt")

        def on_host() -> None:
            with residency.Checkpointer(f"{folder}/run") as checkpointer:
                checkpointer.restore({"x": torch.zeros(1)})

        assert in_child(on_device) == "passed"
        starts_nothing(on_host)
        drawn["then"] = torch.load(f"{folder}/drawn.pt")
    assert torch.equal(torch.rand(5, device="cuda").cpu(), drawn["then"])


if __name__ == "__main__":
    run_all()
