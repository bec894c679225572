"""Runs cases of tests/sim/test_cuda_face.py in one process, in which the simulator is CUDA: what
the allocator remembers of itself, and what torch's own tools make of that.
"""

from __future__ import annotations

import gc
import pickle
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.cuda import _memory_viz
from worker_cases import Cases

import residency
from residency import sim

case = Cases()
MIB = 1 << 20
record = torch.cuda.memory._record_memory_history
failures: list[tuple[int, int, int, int]] = []  # of which an observer was told


def empty(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")


def enable(*, dry: bool = False) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    sim.enable("1GiB", workspaces=False, context="0B", dry=dry, device="cuda")


@contextmanager
def recording(**options: Any) -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    record(**{"stacks": "python"} | options)
    try:
        yield
    finally:
        record(enabled=None)


def trace() -> list[dict[str, Any]]:
    traces = torch.cuda.memory._snapshot()["device_traces"]
    assert len(traces) == torch.cuda.device_count()
    return list(traces[0])


def events() -> list[tuple[str, int]]:
    return [(event["action"], event["size"]) for event in trace()]


def lines(frames: list[dict[str, Any]]) -> list[str]:
    return [frame["name"] for frame in frames if frame["filename"] == __file__]


# -------------------------------------------------------------------------------------- the events


@case
def events_bear_the_bytes_asked_for_and_segments_the_whole() -> None:
    with recording():
        value = empty(3 * MIB - 5)
        address = value.data_ptr()
        del value
        small = empty(1)
        torch.cuda.empty_cache()
        shown = trace()
        assert [(event["action"], event["size"]) for event in shown] == [
            ("segment_alloc", 20 * MIB),
            ("alloc", 3 * MIB - 5),
            ("free_requested", 3 * MIB - 5),
            ("free_completed", 3 * MIB - 5),
            ("segment_alloc", 2 * MIB),
            ("alloc", 1),
            ("segment_free", 20 * MIB),
        ]
        assert {event["addr"] for event in shown} == {address, small.data_ptr()}
        assert {event["stream"] for event in shown} == {0}
        assert {event["pool_id"] for event in shown} == {(0, 0)}
        times = [event["time_us"] for event in shown]
        assert times == sorted(times)


@case
def a_snapshot_is_an_event_with_the_active_bytes_after_what_it_shows() -> None:
    with recording():
        kept = empty(600)
        before = events()
        assert events() == [*before, ("snapshot", 1024)]
        torch.cuda.memory_snapshot(include_traces=False)
        assert events() == [*before, *[("snapshot", 1024)] * 3]
    del kept


@case
def a_block_used_elsewhere_is_free_when_the_next_allocation_finds_it_so() -> None:
    side = torch.cuda.Stream()
    with recording():
        used = empty(1000)
        used.record_stream(side)
        del used
        assert events()[-1] == ("free_requested", 1000)
        other = empty(2000)
        assert [event for event in events() if event[0] != "snapshot"][-2:] == [
            ("free_completed", 1000),
            ("alloc", 2000),
        ]
        with torch.cuda.stream(side):
            there = empty(1)
        assert trace()[-2]["stream"] == side.cuda_stream
    del other, there


@case
def of_segments_that_grow_what_is_mapped_and_unmapped_is_recorded() -> None:
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        with recording():
            value = empty(30 * MIB - 5)
            address = value.data_ptr()
            del value
            torch.cuda.empty_cache()
            shown = trace()
            assert [event["action"] for event in shown] == [
                "segment_map",
                "alloc",
                "free_requested",
                "free_completed",
                "segment_unmap",
            ]
            assert (shown[0]["addr"], shown[0]["size"]) == (address, 40 * MIB)
            assert (shown[-1]["addr"], shown[-1]["size"]) == (address, 40 * MIB)
            settings = torch.cuda.memory._snapshot()["allocator_settings"]
            assert settings["expandable_segments"]
            assert settings["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


@case
def what_is_in_a_private_pool_bears_its_name() -> None:
    pool = torch.cuda.MemPool()
    with recording():
        with torch.cuda.use_mem_pool(pool):
            value = empty(1)
        other = empty(1)
        assert [event["pool_id"] for event in trace()] == [pool.id] * 2 + [(0, 0)] * 2
        torch.cuda.memory_snapshot(pool.id)
        assert trace()[-1]["pool_id"] == pool.id
    del value, other, pool


@case
def of_a_failed_allocation_the_history_and_the_observers_are_told_before_the_error() -> None:
    torch._C._cuda_attach_out_of_memory_observer(lambda *told: failures.append(told))
    with recording():
        kept = empty(600 * MIB)
        cached = empty(100 * MIB)
        del cached
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 502\.00 MiB"):
            empty(501 * MIB - 5)
        shown = trace()
        # The cache was flushed first.
        assert [event["action"] for event in shown[-2:]] == ["segment_free", "oom"]
        assert (shown[-1]["size"], shown[-1]["device_free"]) == (501 * MIB, 424 * MIB)
        assert "addr" not in shown[-1]
        assert lines(shown[-1]["frames"])[0] == "empty"
    assert failures == [(0, 502 * MIB, 1024 * MIB, 424 * MIB)]
    torch.cuda.set_per_process_memory_fraction(0.75)
    try:
        with pytest.raises(torch.OutOfMemoryError, match=r"768\.00 MiB allowed"):
            empty(200 * MIB)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert failures[1:] == [(0, 200 * MIB, 768 * MIB, 424 * MIB)]
    del kept


# -------------------------------------------------------------------------------------- the stacks


def make_one() -> torch.Tensor:
    return empty(700)


def drop(holder: list[torch.Tensor]) -> None:
    holder.clear()


def stacks_of(context: str | None) -> list[list[str]]:
    """Of an allocation, the free of it, a block that is there, and its segment."""
    with recording(context=context):
        holder = [make_one()]
        drop(holder)
        kept = make_one()
        snapshot = torch.cuda.memory._snapshot()
        (segment,) = snapshot["segments"]
        block = segment["blocks"][0]
        found = {event["action"]: event for event in snapshot["device_traces"][0]}
        del kept
    assert ("frames" in found["alloc"]) is (context in ("alloc", "all"))
    return [
        lines(shown.get("frames", []))[:1]
        for shown in (found["alloc"], found["free_requested"], found["free_completed"], block)
    ]


@case
def stacks_are_kept_of_what_was_asked_for() -> None:
    here, there = ["empty"], ["drop"]
    assert stacks_of(None) == [[], [], [], []]
    assert stacks_of("state") == [[], [], [], here]
    assert stacks_of("alloc") == [here, here, here, here]
    assert stacks_of("all") == [here, there, there, here]


@case
def a_stack_goes_from_the_call_outwards_and_may_show_what_python_called() -> None:
    with recording():
        value = make_one()
        frames = trace()[-1]["frames"]
        assert lines(frames)[:2] == ["empty", "make_one"]
        source = Path(__file__).read_text().splitlines()
        assert "torch.empty" in source[frames[0]["line"] - 1]
        traceback = torch._C._cuda_allocationTraceback(value.data_ptr())
        assert traceback == frames
        assert torch._C._cuda_allocationTraceback(value.data_ptr() + 1) is None
    with recording(stacks="all"):
        other = make_one()
        names = [frame["name"] for frame in trace()[-1]["frames"]]
        assert any("Machine::allocate" in name for name in names)
        assert "make_one" in names
    assert torch._C._cuda_allocationTraceback(other.data_ptr())  # for as long as it is there
    del value, other


@case
def a_block_keeps_its_stack_when_nothing_is_recorded_any_more() -> None:
    with recording():
        kept = make_one()
    (segment,) = torch.cuda.memory._snapshot()["segments"]
    assert lines(segment["blocks"][0]["frames"])[:2] == ["empty", "make_one"]
    assert segment["blocks"][1]["frames"] == []
    del kept
    other = make_one()
    (segment,) = torch.cuda.memory._snapshot()["segments"]
    assert [block["frames"] for block in segment["blocks"]] == [[], []]
    del other


@case
def threads_that_allocate_and_free_are_recorded_together() -> None:
    def work() -> None:
        for _ in range(200):
            make_one()

    with recording():
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        allocations = [event for event in trace() if event["action"] == "alloc"]
        assert len(allocations) == 600
        assert {tuple(lines(event["frames"])) for event in allocations} == {
            ("empty", "make_one", "work")
        }


# ------------------------------------------------------------------------------------- the history


@case
def the_latest_events_are_kept_until_recording_stops() -> None:
    with recording(max_entries=3):
        for size in (1, 2):
            empty(size)
        assert events() == [("alloc", 2), ("free_requested", 2), ("free_completed", 2)]
        record(max_entries=2, stacks="python")  # goes on
        empty(3)
        assert events() == [("free_requested", 3), ("free_completed", 3)]
        record(clear_history=True, stacks="python")
        assert events() == []
    assert events() == []
    empty(4)
    assert events() == []


@case
def of_the_state_alone_one_event_is_kept() -> None:
    with recording(enabled="state"):
        kept = [empty(size) for size in (1, 2)]
        snapshot = torch.cuda.memory._snapshot()
        assert [e["size"] for e in snapshot["device_traces"][0]] == [2]
        blocks = snapshot["segments"][0]["blocks"]
        assert all(block["frames"] for block in blocks[:2])
    del kept


@case
def the_earlier_form_of_the_call_works() -> None:
    record(True, True, 5, True)
    try:
        value = make_one()
        (event,) = [event for event in trace() if event["action"] == "alloc"]
        assert lines(event["frames"])[:2] == ["empty", "make_one"]
    finally:
        record(False)
    assert events() == []
    del value


@case
def events_may_be_left_out_and_bear_a_text() -> None:
    with recording(skip_actions=["free_requested", "segment_alloc"]):
        torch._C._cuda_setMemoryMetadata("step 1")
        try:
            empty(1)
            assert torch._C._cuda_getMemoryMetadata() == "step 1"
        finally:
            torch._C._cuda_setMemoryMetadata("")
        empty(2)
        shown = [(e["action"], e["user_metadata"]) for e in trace()]
        assert shown == [
            ("alloc", "step 1"),
            ("free_completed", "step 1"),
            ("alloc", ""),
            ("free_completed", ""),
        ]


@case
def the_librarys_phases_are_the_texts_of_events() -> None:
    with recording():
        with residency.phase("save"):
            kept = empty(1)
        assert [event["user_metadata"] for event in trace()] == ["save", "save"]
        del kept
        assert trace()[-1]["user_metadata"] == ""


@case
def ranges_of_the_program_are_annotations() -> None:
    def work() -> None:
        with torch.profiler.record_function("elsewhere"):
            empty(1)

    for of_all, expected in ((False, ["here"]), (True, ["here", "elsewhere"])):
        with recording(global_record_annotations=of_all):
            with torch.profiler.record_function("here"):
                empty(1)
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            shown = torch.cuda.memory._snapshot()["external_annotations"]
            stages = [(annotation["name"], annotation["stage"]) for annotation in shown]
            assert stages == [(name, stage) for name in expected for stage in ("START", "END")]
            assert {annotation["device"] for annotation in shown} == {0}


@case
def what_means_nothing_is_refused_and_changes_nothing() -> None:
    with recording():
        kept = empty(1)
        before = events()
        for options, message in (
            ({"enabled": "most"}, "expected state to be 'state', 'all', or None"),
            ({"context": "some"}, "expected context to be 'state', 'alloc', 'all', or None"),
            ({"stacks": "c++"}, "expected stacks to be 'python', or 'all'"),
            ({"skip_actions": ["allocate"]}, "Unknown TraceEntry action: allocate"),
        ):
            with pytest.raises(RuntimeError, match=message):
                record(**options)
        with pytest.raises(TypeError):
            record(max_entries=-1)
        assert [event for event in events() if event[0] != "snapshot"] == before
    del kept


# -------------------------------------------------------------------------------- torch's own tools


def train(steps: int = 2) -> None:
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(steps):
        model(torch.randn(64, 256, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def dumped_training() -> dict[str, Any]:
    """As the tutorial of torch's snapshots does it."""
    record(max_entries=100_000)
    train()
    with tempfile.TemporaryDirectory() as folder:
        torch.cuda.memory._dump_snapshot(f"{folder}/snapshot.pickle")
        snapshot: dict[str, Any] = pickle.loads(Path(folder, "snapshot.pickle").read_bytes())
    record(enabled=None)
    return snapshot


def look_through(snapshot: dict[str, Any]) -> None:
    def as_it_is(flamegraph: str) -> str:  # the script that draws it comes from the network
        return flamegraph

    told = _memory_viz.trace(snapshot)
    assert f"{len(snapshot['device_traces'][0])} entries" in told
    assert " = cudaMalloc(" in told
    assert "# free completed for" in told
    assert "segments: " in _memory_viz.segsum(snapshot)
    assert "stream_0;inactive;" in _memory_viz.memory(snapshot, format_flamegraph=as_it_is)
    assert "seg_" in _memory_viz.segments(snapshot, format_flamegraph=as_it_is)
    assert _memory_viz.compare([], snapshot["segments"], format_flamegraph=as_it_is)
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "snapshot.pickle" in plot(snapshot)
    assert "Cached" in _memory_viz.trace_plot(snapshot, plot_segments=True)


def balance(snapshot: dict[str, Any]) -> list[tuple[str, int]]:
    """Checks that what the events say comes to what the segments show; returns the events."""
    live: dict[int, int] = {}
    reserved: dict[int, int] = {}
    shown = snapshot["device_traces"][0]
    for event in shown:
        if event["action"] == "alloc":
            assert event["addr"] not in live
            live[event["addr"]] = event["size"]
        elif event["action"] == "free_completed":
            assert live.pop(event["addr"]) == event["size"]
        elif event["action"] == "segment_alloc":
            reserved[event["addr"]] = event["size"]
        elif event["action"] == "segment_free":
            del reserved[event["addr"]]
    assert reserved == {s["address"]: s["total_size"] for s in snapshot["segments"]}
    assert live == {
        block["address"]: block["requested_size"]
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    return [(event["action"], event["size"]) for event in shown]


@case
def a_dumped_training_opens_in_torchs_tools_and_is_the_same_in_dry_mode() -> None:
    found = []
    for dry in (False, True):
        enable(dry=dry)
        snapshot = dumped_training()
        look_through(snapshot)
        found.append(balance(snapshot))
        assert any("train" in lines(e["frames"]) for e in snapshot["device_traces"][0])
    enable()
    assert len(found[0]) > 100
    assert found[0] == found[1]


@case
def torchs_profiler_sees_the_devices_memory() -> None:
    options: Any = {"profile_memory": True, "record_shapes": True, "with_stack": True}
    options["activities"] = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(**options) as profile:
        train(1)
    taken = sum(e.device_memory_usage for e in profile.events() if e.device_memory_usage > 0)
    assert taken > 256 * 512 * 4
    assert "snapshot.pickle" in _memory_viz.profile_plot(profile)


def main(folder: Path) -> None:
    sim.enable("1GiB", workspaces=False, context="0B", device="cuda")
    case.run(folder / "outcomes.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
