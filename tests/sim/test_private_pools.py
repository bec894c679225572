"""Private pools: their segments are their own, and stay while the pool lives."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from allocator import KIB, LARGE_SEGMENT, MIB, SMALL_SEGMENT, accelerator, empty, start, stat

pytestmark = [pytest.mark.sim, pytest.mark.usefixtures("default_settings_afterwards")]


def _pool_bytes(pool: object, figure: str = "current", kind: str = "all") -> int:
    stats = torch.sim.private_pool_stats()
    return int(stats[pool.id][kind][figure])  # type: ignore[attr-defined]


@pytest.mark.parametrize("expands", [False, True])
def test_a_private_pool_has_segments_of_its_own(expands: bool) -> None:
    start(64 * MIB, f"expandable_segments:{expands}")
    pool = torch.sim.MemPool()
    assert pool.use_count() == 1
    cached = empty(KIB)
    del cached
    with torch.sim.use_mem_pool(pool):
        assert pool.use_count() == 2
        inside = [empty(KIB), empty(2 * MIB)]
    outside = empty(KIB)
    assert accelerator.memory_reserved() == 2 * SMALL_SEGMENT + LARGE_SEGMENT
    assert _pool_bytes(pool) == SMALL_SEGMENT + LARGE_SEGMENT
    assert _pool_bytes(pool, kind="small_pool") == SMALL_SEGMENT
    assert accelerator.memory_allocated() == 2 * MIB + 2 * KIB
    del inside, outside


@pytest.mark.parametrize("expands", [False, True])
def test_a_private_pool_keeps_its_memory_while_it_lives(expands: bool) -> None:
    start(64 * MIB, f"expandable_segments:{expands}")
    pool = torch.sim.MemPool()
    with torch.sim.use_mem_pool(pool):
        inside = empty(2 * MIB)
    address = inside.data_ptr()
    del inside
    accelerator.empty_cache()
    assert accelerator.memory_reserved() == _pool_bytes(pool) == LARGE_SEGMENT
    outside = empty(2 * MIB)
    assert outside.data_ptr() != address
    with torch.sim.use_mem_pool(pool):
        assert empty(2 * MIB).data_ptr() == address
    pool_id = pool.id
    del pool, outside
    accelerator.empty_cache()
    assert accelerator.memory_reserved() == 0
    figures = torch.sim.private_pool_stats()[pool_id]["all"]
    assert (figures["current"], figures["peak"]) == (0, LARGE_SEGMENT)


def test_a_tensor_may_outlive_its_private_pool() -> None:
    start(64 * MIB)
    pool = torch.sim.MemPool()
    with torch.sim.use_mem_pool(pool):
        kept = torch.ones(1000, device="sim")
        gone = empty(2 * MIB)
    del gone
    del pool  # gives back what is free at once, the rest with empty_cache
    assert accelerator.memory_reserved() == SMALL_SEGMENT
    assert kept.sum().item() == 1000.0
    del kept
    accelerator.empty_cache()
    assert accelerator.memory_reserved() == 0


def test_only_the_thread_that_uses_a_private_pool_allocates_in_it() -> None:
    start(64 * MIB)
    pool, elsewhere = torch.sim.MemPool(), []
    with torch.sim.use_mem_pool(pool):
        thread = threading.Thread(target=lambda: elsewhere.append(empty(KIB)))
        thread.start()
        thread.join()
        assert accelerator.memory_reserved() == SMALL_SEGMENT
        assert pool.id not in torch.sim.private_pool_stats()
        with pytest.raises(RuntimeError, match="already"), torch.sim.use_mem_pool(pool):
            pass
    assert pool.use_count() == 1


def test_the_cache_is_not_flushed_for_a_request_of_a_private_pool() -> None:
    start(64 * MIB)
    cached = empty(40 * MIB)
    del cached
    pool = torch.sim.MemPool()
    with torch.sim.use_mem_pool(pool):
        freed = empty(2 * MIB)
        del freed
        with pytest.raises(
            torch.OutOfMemoryError,
            match=r"with 20\.00 MiB allocated in private pools \(e\.g\., CUDA Graphs\), ",
        ):
            empty(30 * MIB)
    assert stat("num_alloc_retries") == 0
    assert empty(4 * MIB).numel() == 4 * MIB
