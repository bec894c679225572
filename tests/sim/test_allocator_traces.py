"""The allocator, against what CUDA's did in recorded runs: every address, every growth."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from residency import sim

pytestmark = pytest.mark.sim
ROOT = Path(__file__).resolve().parents[2]

SMALL_SEGMENT = 2 << 20
LARGEST_SMALL = 1 << 20
GRANULE = 512


def _round(num_bytes: int) -> int:
    return max(GRANULE, -(-num_bytes // GRANULE) * GRANULE)


class Recording:
    """One trace, with the state that it started from: the final one with every event undone."""

    def __init__(self, path: Path) -> None:
        with gzip.open(path) as file:
            trace = json.load(file)
        self.events: list[list[Any]] = trace["events"]
        self.segments: dict[int, tuple[int, bool]] = {}
        self.live: dict[int, int] = {}  # address -> requested bytes
        for segment in trace["final_segments"]:
            is_small = segment["segment_type"] == "small"
            self.segments[segment["address"]] = (segment["total_size"], is_small)
            for address, _, requested, state in segment["blocks"]:
                if state.startswith("active"):
                    self.live[address] = requested
        for action, address, size, _ in reversed(self.events):
            if action == "alloc":
                self.live.pop(address, None)
            elif action == "free_completed":
                self.live[address] = size
            elif action == "segment_alloc":
                self.segments.pop(address, None)
            elif action == "segment_free":
                self.segments[address] = (size, size == SMALL_SEGMENT)

    def layout(self, start: int) -> list[tuple[int, int]]:
        """(size, requested) of a segment's blocks; requested is 0 for a free one."""
        total, is_small = self.segments[start]
        addresses = sorted(a for a in self.live if start <= a < start + total)
        blocks, cursor = [], start
        for i, address in enumerate(addresses):
            if address > cursor:
                blocks.append((address - cursor, 0))
            following = addresses[i + 1] if i + 1 < len(addresses) else start + total
            size = _round(self.live[address])
            slack = following - address - size
            # A remainder that is too small to be split off belongs to the block.
            if slack <= (GRANULE - 1 if is_small else LARGEST_SMALL):
                size += slack
            blocks.append((size, self.live[address]))
            cursor = address + size
        if cursor < start + total:
            blocks.append((start + total - cursor, 0))
        return blocks


def replay(path: Path) -> int:
    """Replays a trace, and returns its number of allocations: each address must be the recorded."""
    recording = Recording(path)
    replay = sim.TraceReplay()
    reserved = peak_reserved = 0
    for start in sorted(recording.segments):
        total, is_small = recording.segments[start]
        replay.adopt_segment(start, total, is_small, recording.layout(start))
        reserved += total
    known = set(recording.live)
    peak_reserved = reserved
    segment, num_allocations, released = 0, 0, set()
    actions = recording.events
    for i, (action, address, size, _) in enumerate(actions):
        if action == "segment_alloc":
            segment = address
            reserved += size
            peak_reserved = max(peak_reserved, reserved)
        elif action == "segment_free":
            reserved -= size
            released.add(address)
            if i + 1 == len(actions) or actions[i + 1][0] != "segment_free":
                assert set(replay.empty_cache()) == released, (path.name, i)
                released = set()
        elif action == "alloc":
            found, grew = replay.allocate(size, segment)
            assert (found, grew) == (address, segment != 0), (path.name, i, size)
            known.add(address)
            segment = 0
            num_allocations += 1
        elif action == "free_completed" and address in known:
            known.discard(address)
            replay.free(address)
    assert replay.peak_reserved_bytes() == peak_reserved, path.name
    return num_allocations


def test_every_recorded_allocation_gets_its_recorded_address(trace_files: list[Path]) -> None:
    sim.enable("1GiB")
    for path in trace_files:
        assert replay(path) > 1000, path.name


def test_what_the_recorder_writes_can_be_replayed(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    command = [sys.executable, "-m", "benchmarks.record_allocations", tmp_path, "--small"]
    done = subprocess.run(
        [*command, "--only", "vit"],
        cwd=ROOT,
        env={**os.environ, "RESIDENCY_TEST_DEVICE": "sim-as-cuda"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    sim.enable("1GiB")
    found = {path.name: replay(path) for path in tmp_path.iterdir()}
    names = [f"vit_{setting}.json.gz" for setting in ("float32", "bfloat16_fused", "checkpointing")]
    assert sorted(found) == sorted(names)
    assert min(found.values()) > 300
