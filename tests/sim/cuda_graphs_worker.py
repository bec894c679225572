"""Runs cases of tests/sim/test_cuda_face.py in one process, in which the simulator is CUDA: what
the allocator shows of itself, private pools among it, what the library reads there, and graphs.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from worker_cases import Cases, OwnAttention, draw, on_thread

import residency
from residency import _device, _private_pools, sim
from residency._handoff._residue import residue_lines
from residency._transfer import _mover

case = Cases()
MIB = 1 << 20
GPU = torch.device("cuda", 0)


def empty(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")


def segment_of(tensor: torch.Tensor, **options: Any) -> dict[str, Any]:
    address = tensor.data_ptr()
    segments = torch.cuda.memory_snapshot(**options)
    found = [s for s in segments if s["address"] <= address < s["address"] + s["total_size"]]
    assert len(found) == 1
    return found[0]


# ----------------------------------------------------------------------------------- snapshots


@case
def a_snapshot_shows_every_segment_block_by_block() -> None:
    side = torch.cuda.Stream()
    kept, dropped, used = empty(3 * MIB - 5), empty(2 * MIB), empty(4 * MIB)
    with torch.cuda.stream(side):
        used.fill_(1)
        used.record_stream(side)
    del dropped, used
    segment = segment_of(kept)
    states = ["active_allocated", "inactive", "active_pending_free", "inactive"]
    assert [block["state"] for block in segment["blocks"]] == states
    assert [block["size"] // MIB for block in segment["blocks"]] == [3, 2, 4, 11]
    assert segment["blocks"][0]["requested_size"] == 3 * MIB - 5
    addresses = [block["address"] for block in segment["blocks"]]
    assert addresses == [kept.data_ptr() + offset * MIB for offset in (0, 3, 5, 9)]
    figures = {name: segment[name] for name in ("total_size", "allocated_size", "active_size")}
    assert figures == {
        "total_size": 20 * MIB,
        "allocated_size": 3 * MIB,
        "active_size": 7 * MIB,
    }
    assert segment["requested_size"] == 7 * MIB - 5
    assert (segment["device"], segment["stream"], segment["segment_type"]) == (0, 0, "large")
    assert not segment["is_expandable"]
    torch.cuda.synchronize()


@case
def a_snapshots_sums_are_the_allocators_figures() -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        kept = [empty(100), empty(30 * MIB)]
    segments = torch.cuda.memory_snapshot()
    assert sum(s["total_size"] for s in segments) == torch.cuda.memory_reserved()
    assert sum(s["allocated_size"] for s in segments) == torch.cuda.memory_allocated()
    in_pool = torch.cuda.memory_snapshot(pool.id)
    assert [s["segment_pool_id"] for s in in_pool] == [pool.id] * 2
    assert in_pool == [s for s in segments if s["segment_pool_id"] != (0, 0)]
    assert in_pool == torch.cuda.memory_snapshot(pool.id, include_traces=False)
    del kept, pool


@case
def of_a_segment_that_grows_each_mapped_run_is_shown() -> None:
    torch.cuda.empty_cache()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        tensors = [empty(40 * MIB) for _ in range(3)]
        del tensors[1]
        torch.cuda.empty_cache()
        runs = [s for s in torch.cuda.memory_snapshot() if s["is_expandable"]]
        assert [s["total_size"] for s in runs] == [40 * MIB, 40 * MIB]
        assert [s["address"] for s in runs] == [t.data_ptr() for t in tensors]
        del tensors
        torch.cuda.empty_cache()
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


# ------------------------------------------------------------------- what the library reads there


@contextmanager
def figures_without_pools() -> Iterator[None]:
    """Has CUDA's figures name no private pools, as those of torch before 2.13."""
    real: Callable[[int], dict[str, Any]] = torch._C._cuda_memoryStats

    def older(device: int) -> dict[str, Any]:
        figures = real(device)
        figures.pop("reserved_bytes_by_private_pools", None)
        return figures

    with mock.patch.object(torch._C, "_cuda_memoryStats", older):
        yield


def check_pools() -> None:
    torch.cuda.empty_cache()
    before = residency.memory_state()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        kept, dropped = empty(3 * MIB), empty(40 * MIB)
    del dropped
    state = residency.memory_state()
    assert state.pooled - before.pooled == 57 * MIB
    assert (state.returnable, state.stuck) == (before.returnable, before.stuck)
    assert state.is_returnable_exact
    figures = _device.allocator_figures(GPU)
    assert _private_pools.reserved_bytes(GPU, figures) == 60 * MIB
    assert "60.00 MiB  reserved by private pools" in "".join(residue_lines(GPU, state))
    assert _private_pools.may_have_graphs()
    model = nn.Linear(4, 4, device="cuda")
    with pytest.warns(UserWarning, match="a captured graph, or another private pool"):
        residency.park(model)
    residency.unpark(model)
    del kept, pool


@case
def figures_that_name_private_pools_are_believed() -> None:
    named = "reserved_bytes_by_private_pools" in torch.cuda.memory_stats_as_nested_dict()
    assert named is (torch.torch_version.TorchVersion(torch.__version__) >= (2, 13))
    check_pools()


@case
def where_figures_name_no_private_pools_the_segments_tell() -> None:
    with figures_without_pools():
        check_pools()


@case
def what_was_not_looked_at_is_not_called_exact() -> None:
    kept = empty(512)
    with figures_without_pools():
        figures = _device.allocator_figures(GPU)
        assert _private_pools.free_bytes(GPU, figures, walk=False) is None
        with mock.patch.object(torch.cuda, "memory_snapshot", side_effect=RuntimeError):
            state = residency.memory_state()
        assert not state.is_returnable_exact
        assert any("private pools" in note for note in state.notes)
    assert _private_pools.free_bytes(GPU, _device.allocator_figures(GPU), walk=False) == (0, 0)
    assert residency.memory_state().is_returnable_exact
    del kept


# ------------------------------------------------------------------------------------- captures


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph | None = None, **options: Any) -> Iterator[Any]:
    """Captures a new stream, as ``torch.cuda.graph`` does; the stream is left also on an error."""
    made = torch.cuda.CUDAGraph() if graph is None else graph
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        made.capture_begin(**options)
        try:
            yield made
        finally:
            made.capture_end()


def spoils(call: Callable[[], object], words: str, **options: Any) -> None:
    """Checks that a call is refused in a capture, and has ended it."""
    ended = pytest.raises(torch.AcceleratorError, match=r"due to a previous error during capture")
    with ended, capturing(**options), pytest.raises(torch.AcceleratorError, match=words):
        call()
    assert not torch.cuda.is_current_stream_capturing()
    value = torch.ones(4, device="cuda")
    with capturing() as graph:
        value.add_(1)
    graph.replay()
    assert value.tolist() == [2.0] * 4


def recorded() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event


@case
def a_capture_runs_nothing_and_each_replay_all_of_it() -> None:
    value, count = torch.arange(6.0, device="cuda"), torch.zeros((), device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        count.add_(1)
        view = value.view(2, 3).t()
        total = (view.contiguous() @ view.t().contiguous()).sum()
        largest, places = value.sort(descending=True)
        parts = torch.cat([value * 2, value[:2]]).split(4)
    assert not torch.cuda.is_current_stream_capturing()
    assert count.item() == 0
    for replay in range(1, 4):
        value.copy_(torch.arange(6.0) * replay)
        graph.replay()
        expected = torch.arange(6.0) * replay
        both = expected.view(2, 3).t()
        assert total.item() == (both @ both.t()).sum().item()
        assert torch.equal(largest.cpu(), expected.flip(0))
        assert places.tolist() == [5, 4, 3, 2, 1, 0]
        assert torch.equal(torch.cat(parts).cpu(), torch.cat([expected * 2, expected[:2]]))
        assert count.item() == replay


def training(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], torch.Tensor]]:
    torch.manual_seed(seed)
    layers = [nn.Linear(8, 8), nn.Dropout(0.5), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 1)]
    layers[1:1] = [nn.Unflatten(1, (4, 2)), OwnAttention(), nn.Flatten(), nn.RMSNorm(8)]
    model = nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, capturable=True)
    value = torch.linspace(-1, 1, 32, device="cuda").view(4, 8)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(value).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, optimizer, step


def on_a_side_stream(call: Callable[[], object]) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)


def check_captured_training(before: Callable[[dict[str, Any]], object] = bool) -> None:
    """Steps a model eagerly, and its twin by replays of one captured step: the bits are the same.

    ``before`` gets the twin right before it is captured; what it returns is kept until the end.
    """
    plain, _, plain_step = training(3)
    for _ in range(6):
        expected = plain_step()
    model, optimizer, step = training(3)
    on_a_side_stream(lambda: [step() for _ in range(2)])
    kept = before({"model": model, "optimizer": optimizer})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    for _ in range(4):
        graph.replay()
    assert torch.equal(loss, expected)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    del kept


@case
def a_captured_step_replays_the_bits_of_an_eager_one_random_numbers_among_them() -> None:
    check_captured_training()


@case
def a_step_is_captured_after_a_snapshot_whose_copies_are_under_way_or_over() -> None:
    def save(state: dict[str, Any]) -> residency.Snapshot:
        done = residency.snapshot(state)
        done.wait()
        return residency.snapshot(state)

    check_captured_training(save)


@case
def a_layer_is_made_of_graphs_and_trains_as_it_did() -> None:
    torch.manual_seed(0)
    plain, sample = nn.Linear(4, 4).cuda(), torch.ones(2, 4, device="cuda")
    graphed = nn.Linear(4, 4).cuda()
    graphed.load_state_dict(plain.state_dict())
    with warnings.catch_warnings():  # of torch's own, about what it does itself in there
        warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream")
        made = torch.cuda.make_graphed_callables(graphed, (sample.clone().requires_grad_(),))
        for layer in (plain, made):
            layer(sample * 3).square().sum().backward()
    assert torch.equal(plain.weight.grad, graphed.weight.grad)


NOT_PERMITTED = r"^CUDA error: operation not permitted when stream is capturing"
WAITS: dict[str, Callable[[], object]] = {
    "a number is read": lambda: torch.ones(3, device="cuda")[0].item(),
    "rows are found by their values": lambda: torch.ones(3, device="cuda").nonzero(),
    "the device is waited for": torch.cuda.synchronize,
    "the stream is waited for": lambda: torch.cuda.current_stream().synchronize(),
    "the stream is asked": lambda: torch.cuda.current_stream().query(),
    "memory is page-locked": lambda: torch.empty(3 << 20, dtype=torch.uint8, pin_memory=True),
    "a graph is captured": lambda: torch.cuda.graph(torch.cuda.CUDAGraph()).__enter__(),
}


@case
def what_waits_ends_a_capture() -> None:
    for name, call in WAITS.items():
        torch.accelerator.empty_host_cache()
        try:
            spoils(call, NOT_PERMITTED)
        except BaseException as error:
            raise AssertionError(name) from error


@case
def events_of_outside_and_of_inside_do_not_mix() -> None:
    outside, inside = recorded(), torch.cuda.Event()
    spoils(outside.wait, "^CUDA error: dependency created on uncaptured work in another stream")
    spoils(outside.query, NOT_PERMITTED)
    spoils(outside.synchronize, NOT_PERMITTED)
    captured_event = "^CUDA error: operation not permitted on an event last recorded in a capturing"
    for call in (inside.query, inside.synchronize):
        spoils(lambda call=call: (inside.record(), call()), captured_event)
    torch.cuda.Event().wait()  # that was never recorded: nothing to wait for
    with capturing():
        torch.cuda.Event().wait()


@case
def a_stream_that_waits_for_a_captured_one_is_captured_and_must_come_back() -> None:
    value, side = torch.zeros(4, device="cuda"), torch.cuda.Stream()
    with capturing() as graph:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            assert torch.cuda.is_current_stream_capturing()
            value.add_(1)
        main.wait_stream(side)
        value.mul_(2)
    for _ in range(2):
        graph.replay()
    assert value.tolist() == [6.0] * 4
    unjoined = pytest.raises(torch.AcceleratorError, match="capturing stream has unjoined work")
    with unjoined, capturing():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            value.add_(1)
    side.synchronize()  # is free again


@case
def only_page_locked_memory_is_copied_in_a_capture() -> None:
    source, value = torch.ones(4).pin_memory(), torch.zeros(4, device="cuda")
    spoils(lambda: value.copy_(source), NOT_PERMITTED)  # waits for the copy
    with capturing() as graph:
        value.copy_(source, non_blocking=True)
        with pytest.raises(RuntimeError, match=r"unless the CPU tensor is pinned"):
            value.copy_(torch.ones(4), non_blocking=True)
    source.fill_(5)
    graph.replay()
    assert value.tolist() == [5.0] * 4


@case
def a_captures_mode_says_whose_calls_end_it() -> None:
    event = recorded()
    spoils(lambda: on_thread(event.query), NOT_PERMITTED)
    for mode in ("thread_local", "relaxed"):
        with capturing(capture_error_mode=mode):
            on_thread(event.query)
    spoils(event.query, NOT_PERMITTED, capture_error_mode="thread_local")
    with capturing(capture_error_mode="relaxed"):
        assert event.query()


@case
def a_graph_is_captured_once_on_a_stream_of_its_own() -> None:
    graph = torch.cuda.CUDAGraph()
    for call in (graph.replay, graph.pool):
        with pytest.raises(RuntimeError, match="without a preceding successful capture"):
            call()
    with pytest.raises(RuntimeError, match="on a non-default stream"):
        graph.capture_begin()
    with torch.cuda.stream(torch.cuda.Stream()):
        with pytest.raises(RuntimeError, match="Unknown capture error mode"):
            graph.capture_begin(capture_error_mode="local")
        with pytest.raises(RuntimeError, match="on the same stream it began on"):
            graph.capture_end()
    elsewhere = pytest.raises(RuntimeError, match="on the same stream it began on")
    with capturing(graph), torch.cuda.stream(torch.cuda.Stream()), elsewhere:
        graph.capture_end()
    with pytest.raises(RuntimeError, match="already owns a captured graph"), capturing(graph):
        pass
    assert not torch.cuda.is_current_stream_capturing()
    spoils(torch.cuda.CUDAGraph().capture_begin, "cannot be performed in the present state")


@case
def a_replay_takes_random_numbers_as_it_is_issued_and_nothing_asks_in_a_capture() -> None:
    with capturing() as graph:
        found = draw("cuda")
        for call in (torch.cuda.get_rng_state, torch.cuda.seed, torch.cuda.initial_seed):
            with pytest.raises(RuntimeError, match=r"CUDAGeneratorImpl::.*captur"):
                call()
    torch.cuda.manual_seed(5)
    graph.replay()
    state = torch.cuda.get_rng_state()
    torch.cuda.manual_seed(5)  # while the replay is queued
    assert all(map(torch.equal, draw("cuda"), found))
    assert torch.equal(torch.cuda.get_rng_state(), state)


@case
def a_pools_handle_is_nobody_elses() -> None:
    handles = [torch.cuda.graph_pool_handle() for _ in range(2)]
    assert handles[0] != handles[1]
    assert all(handle[0] == 0 and handle[1] > 0 for handle in handles)
    assert torch.cuda.MemPool().id not in handles


@case
def a_graphs_memory_is_its_pools_until_it_is_gone() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    before, handle = residency.memory_state(), torch.cuda.graph_pool_handle()
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    results = []
    for graph in graphs:
        with capturing(graph, pool=handle):
            results.append(empty(30 * MIB).fill_(1))
    assert {segment_of(result)["segment_pool_id"] for result in results} == {tuple(handle)}
    assert all(graph.pool() == tuple(handle) for graph in graphs)
    graphs.pop().reset()
    results.clear()
    torch.cuda.empty_cache()
    state = residency.memory_state()
    assert (state.pooled - before.pooled, state.returnable) == (60 * MIB, before.returnable)
    assert _private_pools.may_have_graphs()
    del graph
    graphs.clear()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before.reserved


@case
def the_library_refuses_to_give_back_what_is_being_captured() -> None:
    with capturing(), pytest.raises(residency.RefusedError, match="captured"):
        residency.reclaim()


@case
def a_save_goes_on_while_a_graph_is_captured() -> None:
    value = torch.arange(1000.0, device="cuda")
    is_captured, has_asked = threading.Event(), threading.Event()
    real = _mover.wait_asleep

    def wait(event: torch.Event) -> None:
        assert is_captured.wait(30)
        real(event)
        has_asked.set()

    with tempfile.TemporaryDirectory() as folder:
        with mock.patch.object(_mover, "wait_asleep", wait):
            checkpointer = residency.Checkpointer(folder)
            save = checkpointer.save(1, {"value": value})
            with capturing() as graph:
                value.add_(1)
                is_captured.set()
                assert has_asked.wait(30)
            save.wait()
        graph.replay()
        assert value[0].item() == 1
        checkpointer.close()


def main(folder: Path) -> None:
    sim.enable("1GiB", workspaces=False, device="cuda")
    case.run(folder / "outcomes.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
