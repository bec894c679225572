"""Programs about the memory of the accelerator in CUDA's place, that of the host too.

``cuda_program.py`` serves them. What is right: the bytes that a program asked for, and what torch's
documentation says of each figure.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from cuda_bench import MIB, Actions, fails

from residency import sim


def rounded(num_bytes: int) -> int:
    return max(512, (num_bytes + 511) // 512 * 512)


class Memory(Actions):
    """Blocks of any size on any stream, of private pools too, and the figures that they make."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.capacity = 512 * MIB
        sim.enable(self.capacity, device="cuda", context=0, workspaces=False)
        torch.cuda.init()
        self.has_history = self.chance.random() < 0.7
        if self.has_history:
            torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
        self.streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
        self.blocks: list[torch.Tensor] = []
        self.pools: list[torch.cuda.MemPool] = []
        self.counted = self.failed = self.flushed = 0
        self.peak = 0
        self.is_pending = False

    def size(self) -> int:
        most = self.chance.choice([5000, MIB - 100, MIB + 100, 9 * MIB, 15 * MIB, 60 * MIB])
        return self.chance.randrange(1, most)

    def block(self) -> None:
        size, stream = self.size(), self.chance.choice(self.streams)
        pool = self.chance.choice(self.pools) if self.pools and self.chance.random() < 0.3 else None
        self.note(f"block {size} on {stream.cuda_stream} of {pool and pool.id}")
        where = torch.cuda.use_mem_pool(pool) if pool else contextlib.nullcontext()
        with torch.cuda.stream(stream), where:
            try:
                block = torch.empty(size, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError as error:
                self.note("out of memory")
                self.failed += 1
                message = str(error)
                block = None
        if block is None:
            assert message.startswith("CUDA out of memory. Tried to allocate ")
            return
        assert block.data_ptr() % 512 == 0
        self.counted += 1
        self.blocks.append(block)

    def drop(self) -> None:
        for _ in range(self.chance.randrange(1, 6)):
            if self.blocks:
                block = self.blocks.pop(self.chance.randrange(len(self.blocks)))
                if self.chance.random() < 0.2:
                    self.note("record_stream")
                    block.record_stream(self.chance.choice(self.streams))
                    self.is_pending = True
                self.note(f"drop {len(block)}")

    def pool(self) -> None:
        if len(self.pools) < 2:
            self.pools.append(torch.cuda.MemPool())

    def end_pool(self) -> None:
        if self.pools:
            self.note("end of a pool")
            self.pools.pop()

    def empty(self) -> None:
        self.note("empty_cache")
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.is_pending = False
        if not self.blocks and not self.pools:
            assert torch.cuda.memory_reserved() == 0

    def reset(self) -> None:
        self.note("reset_peak_memory_stats")
        torch.cuda.reset_peak_memory_stats()
        stats = torch.cuda.memory_stats()
        for name, value in stats.items():
            if name.endswith(".peak"):
                assert value == stats[name.removesuffix("peak") + "current"], name
        self.peak = 0

    def too_much(self) -> None:
        """Asks for more than is there, or than a fraction allows."""
        self.note("too much")
        size = self.capacity + self.chance.randrange(1, 9 * MIB)
        with fails("CUDA out of memory", torch.OutOfMemoryError):
            torch.empty(size, dtype=torch.uint8, device="cuda")
        self.failed += 1
        self.is_pending = False

    def fraction(self) -> None:
        held = torch.cuda.memory_reserved() / self.capacity
        self.note(f"fraction with {held}")
        torch.cuda.set_per_process_memory_fraction(min(1.0, held + 0.01))
        assert abs(torch.cuda.get_per_process_memory_fraction() - min(1.0, held + 0.01)) < 1e-6
        if held < 0.9:
            with fails("allowed", torch.OutOfMemoryError):
                torch.empty(self.capacity // 10 * 9, dtype=torch.uint8, device="cuda")
            self.failed += 1
        torch.cuda.set_per_process_memory_fraction(1.0)
        for wrong in (-0.1, 1.5):
            with fails("fraction"):
                torch.cuda.set_per_process_memory_fraction(wrong)

    def check(self) -> None:
        stats = torch.cuda.memory_stats()
        self.check_stats(stats)
        self.check_segments(stats)
        assert torch.cuda.memory_allocated() == stats["allocated_bytes.all.current"]
        assert torch.cuda.memory_reserved() == stats["reserved_bytes.all.current"]
        self.peak = max(self.peak, torch.cuda.memory_allocated())
        assert torch.cuda.max_memory_allocated() >= self.peak
        assert torch.cuda.max_memory_reserved() >= torch.cuda.memory_reserved()
        free, total = torch.cuda.mem_get_info()
        assert (total, total - free) == (self.capacity, torch.cuda.memory_reserved())
        torch.cuda.memory_summary()
        if self.has_history:
            self.check_history()

    def check_stats(self, stats: dict[str, int]) -> None:
        """Adds up what each figure says of the others, and of the blocks."""
        families = {name.rsplit(".", 2)[0] for name in stats if ".all." in name}
        families = {name for name in families if "pools" not in name}
        wanted = "allocation segment active inactive_split allocated_bytes reserved_bytes"
        wanted += " active_bytes inactive_split_bytes requested_bytes"
        assert families == set(wanted.split()), families
        for family in families:
            for pool in ("all", "small_pool", "large_pool"):
                current, peak, up, down = (
                    stats[f"{family}.{pool}.{kind}"]
                    for kind in ("current", "peak", "allocated", "freed")
                )
                assert 0 <= current <= peak <= up, (family, pool)
                assert up - down == current, (family, pool)
            for kind in ("current", "allocated", "freed"):
                parts = stats[f"{family}.small_pool.{kind}"] + stats[f"{family}.large_pool.{kind}"]
                assert stats[f"{family}.all.{kind}"] == parts, (family, kind)
        now = {family: stats[f"{family}.all.current"] for family in families}
        assert now["allocation"] == len(self.blocks)
        asked = sum(len(b) for b in self.blocks)
        assert now["requested_bytes"] >= asked  # those of blocks that wait for a stream, too
        least = sum(rounded(len(b)) for b in self.blocks)
        assert least <= now["allocated_bytes"] <= least + MIB * len(self.blocks)
        assert now["allocated_bytes"] <= now["active_bytes"] <= now["reserved_bytes"]
        assert now["active_bytes"] + now["inactive_split_bytes"] <= now["reserved_bytes"]
        assert now["allocation"] <= now["active"]
        if not self.is_pending:
            assert now["active_bytes"] == now["allocated_bytes"]
            assert now["requested_bytes"] == asked
        assert stats["allocation.all.allocated"] == self.counted
        assert stats["num_ooms"] == self.failed
        assert stats["num_device_alloc"] - stats["num_device_free"] == now["segment"]
        assert stats["num_device_alloc"] == stats["segment.all.allocated"]
        for name in ("max_split_size", "num_alloc_retries", "num_sync_all_streams"):
            assert name in stats
        assert stats["oversize_allocations.current"] == stats["oversize_segments.current"] == 0

    def check_segments(self, stats: dict[str, int]) -> None:
        """Adds up segments and blocks; they lie side by side, and are the program's."""
        segments = torch.cuda.memory_snapshot()
        states: dict[str, list[int]] = {"active_allocated": [], "inactive": []}
        owned, split = {}, []
        by_pool: dict[tuple[int, int], int] = {}
        for segment in segments:
            blocks = segment["blocks"]
            place = segment["address"]
            for one, following in zip(blocks, [*blocks[1:], None], strict=True):
                assert one["address"] == place
                place += one["size"]
                states.setdefault(one["state"], []).append(one["size"])
                if one["state"] == "active_allocated":
                    owned[one["address"]] = (one, segment)
                elif one["state"] == "inactive":
                    assert following is None or following["state"] != "inactive", "not joined"
                    if len(blocks) > 1:
                        split.append(one["size"])
            assert place == segment["address"] + segment["total_size"]
            active = [b for b in blocks if b["state"].startswith("active")]
            held = [b for b in active if b["state"] == "active_allocated"]
            assert segment["active_size"] == sum(b["size"] for b in active)
            assert segment["allocated_size"] == sum(b["size"] for b in held)
            assert segment["segment_type"] in ("small", "large")
            if segment["segment_type"] == "small":
                assert segment["total_size"] == 2 * MIB
            elif segment["total_size"] != 20 * MIB:
                assert segment["total_size"] % (2 * MIB) == 0
            key = tuple(segment["segment_pool_id"])
            by_pool[key] = by_pool.get(key, 0) + segment["total_size"]
        assert set(owned) == {b.data_ptr() for b in self.blocks}
        for block in self.blocks:
            found, segment = owned[block.data_ptr()]
            assert found["requested_size"] == len(block)
            assert found["size"] >= rounded(len(block))
            kind = "small" if rounded(len(block)) <= MIB else "large"
            assert segment["segment_type"] == kind, (len(block), segment["segment_type"])
        assert sum(s["total_size"] for s in segments) == stats["reserved_bytes.all.current"]
        assert sum(states["active_allocated"]) == stats["allocated_bytes.all.current"]
        pending = states.get("active_pending_free", [])
        active_bytes = sum(states["active_allocated"]) + sum(pending)
        assert active_bytes == stats["active_bytes.all.current"]
        assert len(split) == stats["inactive_split.all.current"]
        assert sum(split) == stats["inactive_split_bytes.all.current"]
        assert len(segments) == stats["segment.all.current"]
        for pool in self.pools:
            listed = [s for s in segments if s["segment_pool_id"] == tuple(pool.id)]
            assert sum(s["total_size"] for s in listed) == by_pool.get(tuple(pool.id), 0)
            name = "reserved_bytes_by_private_pools." + "_".join(map(str, pool.id))
            figure = stats.get(f"{name}.all.current", 0)
            assert figure == by_pool.get(tuple(pool.id), 0), (figure, by_pool)

    def check_history(self) -> None:
        """Plays the recorded events; what is left of them is what is there."""
        snapshot = torch.cuda.memory._snapshot()
        (trace,) = snapshot["device_traces"]
        live: dict[int, int] = {}
        asked: dict[int, int] = {}
        segments: dict[int, int] = {}
        counts = dict.fromkeys(["alloc", "oom"], 0)
        last = 0
        for event in trace:
            action, size = event["action"], event["size"]
            assert event["time_us"] >= last
            last = event["time_us"]
            counts[action] = counts.get(action, 0) + 1
            if action == "oom":
                assert "device_free" in event
                continue
            address = event["addr"]
            if action == "alloc":
                assert address not in live, "a block that is in use"
                assert any(s <= address < s + n for s, n in segments.items())
                live[address] = asked[address] = size
                assert event["frames"]
            elif action == "free_requested":
                assert asked.pop(address) == size
            elif action == "free_completed":
                assert address not in asked
                assert live.pop(address) == size
            elif action == "segment_alloc":
                assert address not in segments
                segments[address] = size
            elif action == "segment_free":
                assert segments.pop(address) == size
                assert not any(address <= a < address + size for a in live)
        assert asked == {b.data_ptr(): len(b) for b in self.blocks}
        assert segments == {s["address"]: s["total_size"] for s in snapshot["segments"]}
        assert counts["alloc"] == self.counted
        assert counts["oom"] == self.failed

    def act(self) -> None:
        names = ["block"] * 8 + ["drop"] * 4
        names += ["pool", "end_pool", "empty", "reset", "too_much", "fraction"]
        getattr(self, self.chance.choice(names))()
        self.check()


def memory(request: dict[str, Any], log: object) -> None:
    program = Memory(request["seed"])
    with program.told():
        for _ in range(30):
            program.act()
        program.blocks.clear()
        program.pools.clear()
        program.empty()
        program.check()
        torch.cuda.memory._record_memory_history(enabled=None)
        assert torch.cuda.mem_get_info() == (program.capacity, program.capacity)


# Page-locked memory.


def page_locked(request: dict[str, Any], log: object) -> None:
    """Takes and drops page-locked blocks, of powers of two, which come back after their copies."""
    actions = Actions(request["seed"])
    chance = actions.chance
    sim.enable("1GiB", device="cuda", schedule=chance.choice(["late", "overtake"]))
    mine = torch.arange(1 << 20, dtype=torch.uint8, device="cuda")
    blocks: list[torch.Tensor] = []
    cached: dict[int, int] = {}  # by size, of blocks that are owned
    with actions.told():
        for _ in range(40):
            what = chance.choice(["take", "take", "drop", "copied", "empty", "plain"])
            actions.note(what)
            if what == "take":
                size = chance.randrange(1, chance.choice([100, 5000, 1 << 20]))
                if chance.random() < 0.5:
                    blocks.append(torch.empty(size, dtype=torch.uint8, pin_memory=True))
                else:
                    blocks.append(torch.ones(size, dtype=torch.uint8).pin_memory())
                assert blocks[-1].is_pinned()
                assert blocks[-1].pin_memory() is blocks[-1]
                del_size = 1 << (size - 1).bit_length()
                used = sum(1 for b in blocks if 1 << (len(b) - 1).bit_length() == del_size)
                cached[del_size] = max(cached.get(del_size, 0), used)
            elif what == "drop" and blocks:
                blocks.pop(chance.randrange(len(blocks)))
            elif what == "copied" and blocks:
                block = blocks.pop(chance.randrange(len(blocks)))
                block.fill_(chance.randrange(256))
                value = int(block[0])
                taken = block.to("cuda", non_blocking=True)
                size = len(block)
                rounded_size = 1 << (size - 1).bit_length()
                del block
                again = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
                again.fill_(7)  # must not be the block of the copy
                assert bool((taken.cpu() == value).all()), "the block was reused under its copy"
                blocks.append(again)
                used = sum(1 for b in blocks if 1 << (len(b) - 1).bit_length() == rounded_size)
                more = torch.cuda.host_memory_stats()["allocations.current"]
                known = sum(cached.values())
                assert more in (known, known + 1)
                cached[rounded_size] += more - known
                again = torch.empty(0)
            elif what == "empty":
                torch.cuda.synchronize()
                torch.accelerator.empty_host_cache()
                cached = {}
                for block in blocks:
                    key = 1 << (len(block) - 1).bit_length()
                    cached[key] = cached.get(key, 0) + 1
                block = None
            elif what == "plain":
                plain = torch.ones(chance.randrange(1, 1000), dtype=torch.uint8)
                assert not plain.is_pinned()
                taken = plain.to("cuda", non_blocking=True)
                plain.zero_()  # pageable memory was read when the call returned
                assert int(taken.sum()) == len(plain)
                with fails("dense CPU tensors|cpu|CPU"):
                    mine.pin_memory()
            torch.cuda.synchronize()
            stats = torch.cuda.host_memory_stats()
            for family in ("allocations", "allocated_bytes", "active_requests", "active_bytes"):
                current, peak, up, down = (
                    stats[f"{family}.{kind}"] for kind in ("current", "peak", "allocated", "freed")
                )
                assert up - down == current <= peak, family
            owned = sum(size * count for size, count in cached.items())
            assert stats["allocated_bytes.current"] == owned, (owned, stats)
            assert stats["allocations.current"] == sum(cached.values())
            assert stats["num_host_alloc"] == stats["allocations.allocated"]
            assert stats["num_host_free"] == stats["allocations.freed"]
            assert stats["host_alloc_time.count"] == stats["num_host_alloc"]
            least = sum(1 << (len(b) - 1).bit_length() for b in blocks)
            assert least <= stats["active_bytes.current"] <= owned
            assert sim.pinned_memory_stats()["pinned_bytes.current"] == owned
            if chance.random() < 0.1:
                torch.cuda.reset_peak_host_memory_stats()
                stats = torch.cuda.host_memory_stats()
                assert stats["allocated_bytes.peak"] == stats["allocated_bytes.current"]
