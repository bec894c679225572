"""A recorded memory history of a dry run: what torch's viewer and mosaic read of its file."""

from __future__ import annotations

import json
import pickle
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz

# As PyTorch's post "Understanding GPU Memory 1" has it, with a smaller model.
PROFILED = """
import json, torch
from torch import nn
def run(name, **options):
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory._record_memory_history(max_entries=100000, **options)
    model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)).to("cuda:0")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        with torch.profiler.record_function("## forward ##"):
            loss = model(torch.randn(1000, 512, device="cuda:0")).sum()
        with torch.profiler.record_function("## backward ##"):
            loss.backward()
        with torch.profiler.record_function("## optimizer ##"):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    torch.cuda.memory._dump_snapshot(f"{name}.pickle")
    assert torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    stats = torch.cuda.memory_stats()
    figures = ("requested_bytes.all.peak", "requested_bytes.all.current", "reserved_bytes.all.peak")
    json.dump([stats[name] for name in figures] + [torch.cuda.max_memory_allocated()],
              open(f"{name}.json", "w"))
run("python", stacks="python")
run("all")
"""


def peak_of(events: list[dict[str, Any]], last: int, begin: str, end: str) -> int:
    """Returns the most bytes, as both viewers add them up: what the events do not explain of the
    last bytes was there before.
    """
    changes = [
        event["size"] * ((event["action"] == begin) - (event["action"] == end)) for event in events
    ]
    return max(accumulate(changes, initial=last - sum(changes)))


@pytest.mark.whole
def test_viewers_find_the_peaks_of_the_run_and_its_lines(dry_run, tmp_path: Path) -> None:
    outcome = dry_run(PROFILED, options=("--capacity", "4GiB", "--steps", "0"))
    assert outcome.status == 0, outcome.errors
    for name in ("python", "all"):
        snapshot = pickle.loads((tmp_path / f"{name}.pickle").read_bytes())
        requested, last, reserved, allocated = json.loads((tmp_path / f"{name}.json").read_text())
        (events,) = snapshot["device_traces"]
        fields = {"action", "addr", "size", "stream", "time_us", "frames", "user_metadata"}
        assert all(fields <= event.keys() for event in events)
        assert requested <= allocated < requested + 512 * len(events)
        times = [event["time_us"] for event in events]
        assert times == sorted(times)
        segments = snapshot["segments"]
        blocks = [block for segment in segments for block in segment["blocks"]]
        active = [block for block in blocks if block["state"] == "active_allocated"]
        assert sum(block["requested_size"] for block in active) == last
        assert peak_of(events, last, "alloc", "free_completed") == requested
        whole = sum(segment["total_size"] for segment in segments)
        assert peak_of(events, whole, "segment_alloc", "segment_free") == reserved
        made = [event for event in events if event["action"] == "alloc"]
        files = {frame["filename"] for event in made for frame in event["frames"]}
        assert any(file.endswith("script.py") for file in files)
        names = {(each["name"], each["stage"]) for each in snapshot["external_annotations"]}
        assert {("## forward ##", "START"), ("## backward ##", "END")} <= names
        assert "TOTAL MEM" in _memory_viz.trace(snapshot)
        for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
            assert "snapshot.pickle" in plot(snapshot)
        assert "total_reserved" in _memory_viz.segsum(snapshot)
