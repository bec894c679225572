"""Recorded allocator traces, and their replay on the simulated allocator: address by address."""

from __future__ import annotations

import gzip
import json
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from residency_sim import _backend

SMALL_SEGMENT = 2 << 20
LARGEST_SMALL = 1 << 20
GRANULE = 512


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replayed trace came to.

    Attributes:
        num_allocations: How many it has.
        peak_allocated: The most bytes in blocks, with what is too small to be split off a block.
        peak_reserved: The most bytes in segments.
    """

    num_allocations: int
    peak_allocated: int
    peak_reserved: int


def rounded(num_bytes: int) -> int:
    """Returns the least size of a block for so many bytes."""
    return max(GRANULE, -(-num_bytes // GRANULE) * GRANULE)


class Recording:
    """One trace, with the state that it started from: the final one with every event undone."""

    def __init__(self, path: Path) -> None:
        """Reads a file that `record_allocations` wrote, or one of the same form."""
        with gzip.open(path) as file:
            trace = json.load(file)
        self.name = path.name
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
        """Returns (size, requested) of a segment's blocks; requested is 0 for a free one."""
        total, is_small = self.segments[start]
        addresses = sorted(a for a in self.live if start <= a < start + total)
        blocks, cursor = [], start
        for i, address in enumerate(addresses):
            if address > cursor:
                blocks.append((address - cursor, 0))
            following = addresses[i + 1] if i + 1 < len(addresses) else start + total
            size = _block_size(self.live[address], following - address, is_small)
            blocks.append((size, self.live[address]))
            cursor = address + size
        if cursor < start + total:
            blocks.append((start + total - cursor, 0))
        return blocks


def _block_size(num_bytes: int, room: int, is_small: bool) -> int:
    """Returns the size of a block: a remainder too small to be split off belongs to it."""
    size = rounded(num_bytes)
    slack = room - size
    return room if slack <= (GRANULE - 1 if is_small else LARGEST_SMALL) else size


def requests(path: Path) -> list[int]:
    """Returns the bytes of each allocation of a trace, in their order."""
    with gzip.open(path) as file:
        return [size for action, _, size, _ in json.load(file)["events"] if action == "alloc"]


class _Blocks:
    """The blocks that are held, and the most bytes in them."""

    def __init__(self, recording: Recording) -> None:
        self._segments = dict(recording.segments)
        self._starts = sorted(self._segments)
        self._addresses = sorted(recording.live)
        self._sizes: dict[int, int] = {}
        self._held = 0
        for address in self._addresses:
            self._hold(address, recording.live[address])
        self.peak = self._held

    def grow(self, start: int, total: int) -> None:
        self._segments[start] = (total, total == SMALL_SEGMENT)
        insort(self._starts, start)

    def shrink(self, start: int) -> None:
        del self._segments[start]
        self._starts.remove(start)

    def take(self, address: int, num_bytes: int) -> None:
        insort(self._addresses, address)
        self._hold(address, num_bytes)
        self.peak = max(self.peak, self._held)

    def give_back(self, address: int) -> None:
        del self._addresses[bisect_left(self._addresses, address)]
        self._held -= self._sizes.pop(address)

    def _hold(self, address: int, num_bytes: int) -> None:
        start = self._starts[bisect_right(self._starts, address) - 1]
        total, is_small = self._segments[start]
        end, place = start + total, bisect_right(self._addresses, address)
        following = self._addresses[place] if place < len(self._addresses) else end
        size = _block_size(num_bytes, min(following, end) - address, is_small)
        self._sizes[address] = size
        self._held += size


def replay(path: Path) -> Replayed:
    """Replays a trace: each allocation must get its recorded address, each growth come when it did.

    Raises:
        AssertionError: The simulated allocator did something else.
    """
    recording = Recording(path)
    allocator = _backend.core().TraceReplay()
    blocks = _Blocks(recording)
    reserved = 0
    for start in sorted(recording.segments):
        total, is_small = recording.segments[start]
        allocator.adopt_segment(start, total, is_small, recording.layout(start))
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
            blocks.grow(address, size)
        elif action == "segment_free":
            reserved -= size
            released.add(address)
            blocks.shrink(address)
            if i + 1 == len(actions) or actions[i + 1][0] != "segment_free":
                assert set(allocator.empty_cache()) == released, (path.name, i)
                released = set()
        elif action == "alloc":
            found, grew = allocator.allocate(size, segment)
            assert (found, grew) == (address, segment != 0), (path.name, i, size)
            known.add(address)
            blocks.take(address, size)
            segment = 0
            num_allocations += 1
        elif action == "free_completed" and address in known:
            known.discard(address)
            blocks.give_back(address)
            allocator.free(address)
    assert allocator.peak_reserved_bytes() == peak_reserved, path.name
    return Replayed(num_allocations, blocks.peak, peak_reserved)
