"""Settings of the allocator, each figure computed from the rule that CUDA's allocator documents:
expandable segments, splitting, rounding, garbage collection, the memory fraction, private pools.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

import residency
from residency import sim

pytestmark = pytest.mark.sim

KIB = 1 << 10
MIB = 1 << 20
GRANULE = 512
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
DEFAULTS = (
    "expandable_segments:False,large_segment_size_mb:20,max_non_split_rounding_mb:20,"
    "per_process_memory_fraction:1.0"
)

accelerator = torch.accelerator


def _start(capacity: int, settings: str = "") -> None:
    """Empties the device and gives it a capacity and settings, the rest as torch has them."""
    gc.collect()
    accelerator.empty_cache() if sim.is_enabled() else sim.enable()
    sim.enable()
    torch.sim.set_allocator_settings(DEFAULTS)
    torch.sim.set_allocator_settings(settings)
    accelerator.synchronize()
    accelerator.empty_cache()
    assert accelerator.memory_reserved() == 0, "an earlier test left tensors behind"
    sim.enable(capacity)
    accelerator.reset_peak_memory_stats()
    accelerator.reset_accumulated_memory_stats()


@pytest.fixture(autouse=True)
def defaults_afterwards() -> Iterator[None]:
    yield
    _start(8 << 30)


def _empty(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="sim")


def _stat(name: str) -> int:
    return int(accelerator.memory_stats()[name])


def _run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )


# ---------------------------------------------------------------------------- expandable segments


def test_an_expandable_segment_grows_by_whole_granules_at_its_end() -> None:
    _start(128 * MIB, "expandable_segments:True")
    first = _empty(5 * MIB)
    assert accelerator.memory_reserved() == LARGE_SEGMENT
    second = _empty(20 * MIB)  # 15 MiB are free behind the first: one granule more
    assert accelerator.memory_reserved() == 2 * LARGE_SEGMENT
    assert second.data_ptr() == first.data_ptr() + 5 * MIB
    small = _empty(KIB)
    assert accelerator.memory_reserved() == 2 * LARGE_SEGMENT + SMALL_SEGMENT
    stats = accelerator.memory_stats()
    assert stats["num_device_alloc"] == 3
    assert stats["segment.all.allocated"] == 0
    assert stats["inactive_split.all.allocated"] == stats["inactive_split_bytes.all.current"] == 0
    del small


def test_an_expandable_segment_splits_off_any_remainder_of_512_bytes() -> None:
    _start(128 * MIB, "expandable_segments:True")
    tensor = _empty(20 * MIB - GRANULE)  # without the setting it would be charged 20 MiB
    assert accelerator.memory_allocated() == 20 * MIB - GRANULE
    del tensor


def test_granules_that_are_wholly_free_are_unmapped_also_in_the_middle() -> None:
    _start(128 * MIB, "expandable_segments:True")
    # [0, 10) [10, 50) [50, 60) over granules of 20 MiB: only [20, 40) lies wholly in the second.
    tensors = [_empty(10 * MIB), _empty(40 * MIB), _empty(10 * MIB)]
    begin = tensors[0].data_ptr()
    tensors[1] = torch.empty(0)
    assert accelerator.memory_reserved() == 60 * MIB
    accelerator.empty_cache()
    assert accelerator.memory_reserved() == 40 * MIB
    assert accelerator.get_memory_info() == (88 * MIB, 128 * MIB)
    assert _stat("num_device_free") == 1
    assert _stat("inactive_split_bytes.all.current") == 0  # stuck bytes are not told, as on CUDA
    again = _empty(40 * MIB)  # the least address with room: free, unmapped and free again
    assert again.data_ptr() == begin + 10 * MIB
    assert accelerator.memory_reserved() == 60 * MIB
    del tensors, again
    accelerator.empty_cache()
    assert accelerator.memory_reserved() == 0


def test_best_fit_spares_the_end_that_can_grow() -> None:
    _start(128 * MIB, "expandable_segments:True")
    tensors = [_empty(4 * MIB), _empty(6 * MIB), _empty(5 * MIB)]  # and 5 MiB free at the end
    hole = tensors[1].data_ptr()
    tensors[1] = torch.empty(0)
    assert _empty(5 * MIB).data_ptr() == hole


def test_a_smaller_request_takes_the_least_hole_of_an_expandable_segment() -> None:
    _start(128 * MIB, "expandable_segments:True")
    sizes = (3, 2, 4, 2, 2)
    tensors = [_empty(size * MIB) for size in sizes]
    holes = [tensors[0].data_ptr(), tensors[2].data_ptr()]
    tensors[0] = tensors[2] = torch.empty(0)
    assert _empty(3 * MIB - 5).data_ptr() == holes[0]


def test_each_stream_has_an_expandable_segment_of_its_own() -> None:
    _start(128 * MIB, "expandable_segments:True")
    stream = torch.Stream(device="sim")
    ours = _empty(5 * MIB)
    with stream:
        theirs = _empty(5 * MIB)
    assert accelerator.memory_reserved() == 2 * LARGE_SEGMENT
    assert abs(theirs.data_ptr() - ours.data_ptr()) >= 128 * MIB  # ranges wider than the device


def test_other_streams_granules_are_unmapped_before_a_request_fails() -> None:
    _start(64 * MIB, "expandable_segments:True")
    cached = _empty(40 * MIB)
    del cached
    with torch.Stream(device="sim"):
        tensor = _empty(40 * MIB)
    assert accelerator.memory_reserved() == 40 * MIB
    assert (_stat("num_alloc_retries"), _stat("num_ooms")) == (1, 0)
    del tensor


def test_running_out_of_memory_leaves_an_expandable_segment_usable() -> None:
    _start(64 * MIB, "expandable_segments:True")
    held = _empty(30 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 32\.00 MiB"):
        _empty(31 * MIB)  # 10 MiB are free and 21 more need two granules of 20 MiB
    assert (accelerator.memory_allocated(), _stat("num_ooms")) == (30 * MIB, 1)
    assert accelerator.memory_reserved() == 40 * MIB
    more = _empty(30 * MIB)
    assert accelerator.memory_reserved() == 60 * MIB
    del held, more


def test_granules_count_in_a_shared_capacity() -> None:
    _start(64 * MIB, "expandable_segments:True")
    sim.enable(64 * MIB, share="expandable-segments")
    tensor = _empty(30 * MIB)
    assert accelerator.get_memory_info() == (24 * MIB, 64 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        _empty(40 * MIB)
    assert accelerator.get_memory_info() == (24 * MIB, 64 * MIB)
    del tensor
    accelerator.empty_cache()
    assert accelerator.get_memory_info() == (64 * MIB, 64 * MIB)


def test_fresh_and_reused_granules_hold_nan() -> None:
    _start(64 * MIB, "expandable_segments:True")
    for release in (False, True, True):
        tensor = torch.empty(2 * MIB, device="sim")
        assert tensor.isnan().all().item()
        tensor.zero_()
        del tensor
        if release:
            accelerator.empty_cache()


def test_unmapped_granules_leave_nothing_for_the_race_checker_to_find() -> None:
    _start(64 * MIB, "expandable_segments:True")
    sim.enable(64 * MIB, check_races=True)
    lane = torch.Stream(device="sim")
    with lane:
        tensor = torch.ones(2 * MIB, device="sim")
    address = tensor.data_ptr()
    del tensor
    accelerator.empty_cache()
    with lane:
        again = torch.ones(2 * MIB, device="sim")
    assert again.data_ptr() == address or accelerator.memory_reserved() == LARGE_SEGMENT
    with pytest.raises(sim.RaceError):
        again.add_(1)
    del again


def test_a_race_in_an_expandable_segment_is_found_under_every_schedule() -> None:
    for schedule in ("late", "overtake"):
        _start(64 * MIB, "expandable_segments:True")
        sim.enable(64 * MIB, check_races=True, schedule=schedule)
        tensor = torch.ones(2 * MIB, device="sim")
        with pytest.raises(sim.RaceError), torch.Stream(device="sim"):
            tensor.mul_(2)
        del tensor


def test_expandable_segments_in_dry_mode_take_no_memory_of_the_host() -> None:
    _start(64 * MIB, "expandable_segments:True")
    sim.enable("200GiB", dry=True)
    tensors = [_empty(60 << 30), _empty((30 << 30) + 1)]
    granules = -(-((90 << 30) + GRANULE) // LARGE_SEGMENT)
    assert accelerator.memory_reserved() == granules * LARGE_SEGMENT
    assert tensors[1].data_ptr() == tensors[0].data_ptr() + (60 << 30)
    del tensors


def test_turned_off_the_setting_leaves_expandable_segments_alone() -> None:
    _start(128 * MIB, "expandable_segments:True")
    grown = _empty(5 * MIB)
    address = grown.data_ptr()
    del grown
    torch.sim.set_allocator_settings("expandable_segments:False")
    stock = _empty(20 * MIB)
    assert stock.data_ptr() != address
    assert accelerator.memory_reserved() == 2 * LARGE_SEGMENT
    assert _stat("segment.all.current") == 1
    torch.sim.set_allocator_settings("expandable_segments:True")
    assert _empty(4 * MIB).data_ptr() == address
    accelerator.empty_cache()
    assert accelerator.memory_reserved() == LARGE_SEGMENT


# ------------------------------------------------------------------------------ sizes of segments


def test_blocks_above_max_split_size_are_not_split_and_serve_close_requests_only() -> None:
    _start(256 * MIB, "max_split_size_mb:40")
    assert _stat("max_split_size") == 40 * MIB
    large = _empty(50 * MIB)
    address = large.data_ptr()
    assert _stat("oversize_allocations.current") == _stat("oversize_segments.current") == 1
    del large
    small = _empty(10 * MIB)  # below the limit: not from an oversized block
    assert accelerator.memory_reserved() == 60 * MIB
    far = _empty(64 * MIB)
    close = _empty(45 * MIB)  # reused whole: at most 20 MiB too large
    assert close.data_ptr() == address
    assert accelerator.memory_allocated() == (10 + 64 + 50) * MIB
    del far
    other = _empty(44 * MIB)  # 64 is not below 44 + 20
    assert accelerator.memory_reserved() == (60 + 64 + 44) * MIB
    del small, close, other
    accelerator.empty_cache()
    assert _stat("oversize_allocations.current") == _stat("oversize_segments.current") == 0


def test_max_non_split_rounding_widens_what_an_oversized_block_serves() -> None:
    _start(256 * MIB, "max_split_size_mb:40,max_non_split_rounding_mb:30")
    large = _empty(70 * MIB)
    address = large.data_ptr()
    del large
    assert _empty(42 * MIB).data_ptr() == address


def test_an_oversized_block_goes_before_the_whole_cache_does() -> None:
    _start(128 * MIB, "max_split_size_mb:40")
    tensors = [_empty(30 * MIB), _empty(76 * MIB)]
    del tensors
    tensor = _empty(50 * MIB)  # 76 is not below 50 + 20, and 30 + 76 + 50 exceed the capacity
    assert accelerator.memory_reserved() == 80 * MIB
    assert _stat("num_alloc_retries") == 0
    del tensor


def test_large_segments_have_the_size_that_is_set() -> None:
    _start(128 * MIB, "large_segment_size_mb:32")
    tensor = _empty(5 * MIB)
    assert accelerator.memory_reserved() == 32 * MIB
    torch.sim.set_allocator_settings("large_segment_size_mb:32,expandable_segments:True")
    grown = _empty(33 * MIB)
    assert accelerator.memory_reserved() == 32 * MIB + 2 * 32 * MIB
    del tensor, grown


@pytest.mark.parametrize(
    ("settings", "num_bytes", "rounded"),
    [
        # By whole 512 bytes up to 512 times the divisions, then up to a part of the power of two.
        ("roundup_power2_divisions:4", 2048, 2048),
        ("roundup_power2_divisions:4", 1200, 1536),
        ("roundup_power2_divisions:4", 5000, 4096 + 1024),
        ("roundup_power2_divisions:4", 7169, 8192),
        ("roundup_power2_divisions:8", 5000, 4096 + 2 * 512),
        ("roundup_power2_divisions:4", 4096, 4096),
        ("roundup_power2_divisions:4", 3 * MIB + 1, 3 * MIB + 512 * KIB),
        ("roundup_power2_divisions:[4:8,>:2]", 2 * MIB + 1, 2 * MIB + 256 * KIB),
        ("roundup_power2_divisions:[4:8,>:2]", 9 * MIB, 12 * MIB),
        ("roundup_power2_divisions:[4:0,>:2]", 2 * MIB + 1, 2 * MIB + GRANULE),
    ],
)
def test_sizes_are_rounded_up_to_parts_of_a_power_of_two(
    settings: str, num_bytes: int, rounded: int
) -> None:
    _start(128 * MIB, settings)
    tensor = _empty(num_bytes)
    assert accelerator.memory_allocated() == rounded
    assert _stat("requested_bytes.all.current") == num_bytes
    del tensor


# -------------------------------------------------------------------- fraction and old segments


def test_a_memory_fraction_bounds_what_is_reserved() -> None:
    _start(64 * MIB)
    torch.sim.set_per_process_memory_fraction(0.5)
    assert torch.sim.get_per_process_memory_fraction() == 0.5
    held = _empty(30 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match=r"34\.00 MiB is free\. 32\.00 MiB allowed; "):
        _empty(4 * MIB)  # a segment of 20 MiB
    small = _empty(KIB)  # one of 2 MiB
    torch.sim.set_per_process_memory_fraction(1.0)
    large = _empty(4 * MIB)
    assert accelerator.memory_reserved() == 52 * MIB
    del held, small, large


def test_the_fraction_is_of_the_capacity_and_can_be_an_allocator_setting() -> None:
    _start(64 * MIB, "per_process_memory_fraction:0.25")
    assert torch.sim.get_per_process_memory_fraction() == 0.25
    with pytest.raises(torch.OutOfMemoryError, match=r"16\.00 MiB allowed"):
        _empty(18 * MIB)
    sim.enable(128 * MIB)
    assert _empty(32 * MIB).numel() == 32 * MIB


def test_an_expandable_request_is_held_against_the_fraction_as_a_whole_segment() -> None:
    _start(128 * MIB, "expandable_segments:True,per_process_memory_fraction:0.25")
    first = _empty(12 * MIB)
    assert accelerator.memory_reserved() == LARGE_SEGMENT
    with pytest.raises(torch.OutOfMemoryError):
        _empty(14 * MIB)  # 20 + 14 exceed 32 MiB, although a granule would make 40
    del first


@pytest.mark.parametrize("fraction", [-0.1, 1.5, float("nan")])
def test_a_fraction_outside_0_to_1_is_refused(fraction: float) -> None:
    _start(64 * MIB)
    with pytest.raises(residency.InvalidArgumentError, match="expected a number from 0 to 1"):
        torch.sim.set_per_process_memory_fraction(fraction)
    with pytest.raises(TypeError):
        torch.sim.set_per_process_memory_fraction("half")
    assert torch.sim.get_per_process_memory_fraction() == 1.0


OLDER_GOES = "per_process_memory_fraction:0.5,garbage_collection_threshold:"


@pytest.mark.parametrize(
    ("settings", "reserved_mib"),
    [
        # 30, 32 and 34 MiB are reserved, the first two are free, and 36 MiB are asked for.
        (OLDER_GOES + "0.55", 32 + 34 + 36),  # 96 less 0.55 * 128 = 25.6: the older one does
        (OLDER_GOES + "0.5", 34 + 36),  # 32 are wanted: the older one, then the other
        (OLDER_GOES + "0.8", 34 + 36),  # no collection; 132 are not allowed: the cache is flushed
        ("garbage_collection_threshold:0.1", 30 + 32 + 34 + 36),  # means nothing without a fraction
    ],
)
def test_old_segments_are_collected_above_the_threshold(settings: str, reserved_mib: int) -> None:
    _start(256 * MIB, settings)
    oldest = _empty(30 * MIB)
    del oldest
    old = _empty(32 * MIB)
    del old
    held = _empty(34 * MIB)
    assert accelerator.memory_reserved() == 96 * MIB
    more = _empty(36 * MIB)
    assert accelerator.memory_reserved() == reserved_mib * MIB
    assert _stat("num_alloc_retries") == (1 if settings.endswith("0.8") else 0)
    del held, more


# ---------------------------------------------------------------------------------- private pools


def _pool_bytes(pool: object, figure: str = "current", kind: str = "all") -> int:
    stats = torch.sim.private_pool_stats()
    return int(stats[pool.id][kind][figure])  # type: ignore[attr-defined]


@pytest.mark.parametrize("expands", [False, True])
def test_a_private_pool_has_segments_of_its_own(expands: bool) -> None:
    _start(64 * MIB, f"expandable_segments:{expands}")
    pool = torch.sim.MemPool()
    assert pool.use_count() == 1
    cached = _empty(KIB)
    del cached
    with torch.sim.use_mem_pool(pool):
        assert pool.use_count() == 2
        inside = [_empty(KIB), _empty(2 * MIB)]
    outside = _empty(KIB)
    assert accelerator.memory_reserved() == 2 * SMALL_SEGMENT + LARGE_SEGMENT
    assert _pool_bytes(pool) == SMALL_SEGMENT + LARGE_SEGMENT
    assert _pool_bytes(pool, kind="small_pool") == SMALL_SEGMENT
    assert accelerator.memory_allocated() == 2 * MIB + 2 * KIB
    del inside, outside


@pytest.mark.parametrize("expands", [False, True])
def test_a_private_pool_keeps_its_memory_while_it_lives(expands: bool) -> None:
    _start(64 * MIB, f"expandable_segments:{expands}")
    pool = torch.sim.MemPool()
    with torch.sim.use_mem_pool(pool):
        inside = _empty(2 * MIB)
    address = inside.data_ptr()
    del inside
    accelerator.empty_cache()
    assert accelerator.memory_reserved() == _pool_bytes(pool) == LARGE_SEGMENT
    outside = _empty(2 * MIB)
    assert outside.data_ptr() != address
    with torch.sim.use_mem_pool(pool):
        assert _empty(2 * MIB).data_ptr() == address
    pool_id = pool.id
    del pool, outside
    accelerator.empty_cache()
    assert accelerator.memory_reserved() == 0
    figures = torch.sim.private_pool_stats()[pool_id]["all"]
    assert (figures["current"], figures["peak"]) == (0, LARGE_SEGMENT)


def test_a_tensor_may_outlive_its_private_pool() -> None:
    _start(64 * MIB)
    pool = torch.sim.MemPool()
    with torch.sim.use_mem_pool(pool):
        kept = torch.ones(1000, device="sim")
        gone = _empty(2 * MIB)
    del gone
    del pool  # gives back what is free at once, the rest with empty_cache
    assert accelerator.memory_reserved() == SMALL_SEGMENT
    assert kept.sum().item() == 1000.0
    del kept
    accelerator.empty_cache()
    assert accelerator.memory_reserved() == 0


def test_only_the_thread_that_uses_a_private_pool_allocates_in_it() -> None:
    _start(64 * MIB)
    pool, elsewhere = torch.sim.MemPool(), []
    with torch.sim.use_mem_pool(pool):
        thread = threading.Thread(target=lambda: elsewhere.append(_empty(KIB)))
        thread.start()
        thread.join()
        assert accelerator.memory_reserved() == SMALL_SEGMENT
        assert pool.id not in torch.sim.private_pool_stats()
        with pytest.raises(RuntimeError, match="already"), torch.sim.use_mem_pool(pool):
            pass
    assert pool.use_count() == 1


def test_the_cache_is_not_flushed_for_a_request_of_a_private_pool() -> None:
    _start(64 * MIB)
    cached = _empty(40 * MIB)
    del cached
    pool = torch.sim.MemPool()
    with torch.sim.use_mem_pool(pool):
        freed = _empty(2 * MIB)
        del freed
        with pytest.raises(
            torch.OutOfMemoryError,
            match=r"with 20\.00 MiB allocated in private pools \(e\.g\., CUDA Graphs\), ",
        ):
            _empty(30 * MIB)
    assert _stat("num_alloc_retries") == 0
    assert _empty(4 * MIB).numel() == 4 * MIB


# ---------------------------------------------------------------------------------- bad settings

BAD_SETTINGS = [
    ("no_such_setting:1", "no_such_setting"),
    ("expandable_segments:yes", "Expected 'True' or 'False'"),
    ("max_split_size_mb:5", "too small"),
    ("garbage_collection_threshold:2", "invalid"),
    ("roundup_power2_divisions:[256:3]", "power of 2"),
    ("large_segment_size_mb:4", "must be > 10 MB"),
    ("per_process_memory_fraction:2", "expected a number from 0 to 1"),
    ("per_process_memory_fraction:0.5x", "expected a number from 0 to 1"),
    ("backend:cudaMallocAsync", "'native' only"),
    *((f"pinned_num_register_threads:{number}", "power of 2, got") for number in (0, 3, 1000)),
    ("pinned_num_register_threads:256", "less than or equal to 128, got 256"),
    ("pinned_num_register_threads:-8", "expected a whole number"),
    ("pinned_num_register_threads:8x", "expected a whole number"),
    ("pinned_reserve_segment_size_mb:0", "greater than 0"),
    *(
        (f"{name}:1", "expected 'True' or 'False'")
        for name in (
            "graph_capture_record_stream_reuse",
            "pinned_free_catch_all",
            "pinned_use_cuda_host_register",
            "release_lock_on_cudamalloc",
            "throw_on_cudamalloc_oom",
        )
    ),
    ("max_split_size_mb", ""),
]


@pytest.mark.parametrize(("bad", "said"), BAD_SETTINGS)
@pytest.mark.parametrize("first", ["", "large_segment_size_mb:32,expandable_segments:False,"])
def test_a_setting_that_means_nothing_is_refused_and_changes_nothing(
    bad: str, said: str, first: str
) -> None:
    good = "expandable_segments:True,max_split_size_mb:40,per_process_memory_fraction:0.5"
    _start(128 * MIB)
    torch.sim.set_allocator_settings(good)
    with pytest.raises(residency.InvalidArgumentError, match="cannot be used: .*" + said):
        torch.sim.set_allocator_settings(first + bad)
    assert torch._C._accelerator_getAllocatorSettings() == good
    tensor = _empty(5 * MIB)
    assert (_stat("segment.all.current"), accelerator.memory_reserved()) == (0, LARGE_SEGMENT)
    assert _stat("max_split_size") == 40 * MIB
    assert torch.sim.get_per_process_memory_fraction() == 0.5
    del tensor


def test_settings_of_cuda_without_an_effect_on_bytes_are_accepted() -> None:
    _start(64 * MIB)
    settings = (
        "pinned_num_register_threads:128,pinned_use_cuda_host_register:True,"
        "pinned_reserve_segment_size_mb:64,pinned_free_catch_all:False,"
        "release_lock_on_cudamalloc:True,throw_on_cudamalloc_oom:False,"
        "graph_capture_record_stream_reuse:True,backend:native"
    )
    torch.sim.set_allocator_settings(settings)
    assert torch._C._accelerator_getAllocatorSettings() == settings


def test_sizes_that_torch_would_not_take_in_one_string_are_brought_back_too() -> None:
    _start(256 * MIB, "large_segment_size_mb:32")  # to which torch raises the rounding
    with pytest.raises(residency.InvalidArgumentError):
        torch.sim.set_allocator_settings(
            "large_segment_size_mb:64,max_non_split_rounding_mb:70,no_such_setting:1"
        )
    small = _empty(5 * MIB)
    assert accelerator.memory_reserved() == 32 * MIB
    torch.sim.set_allocator_settings("max_split_size_mb:40")
    large = _empty(75 * MIB)  # of 76: the last MiB is not split off
    address = large.data_ptr()
    del large
    far = _empty(44 * MIB)  # 76 is not below 44 + 32
    assert far.data_ptr() != address
    assert _empty(46 * MIB).data_ptr() == address
    del small


def test_torchs_own_setter_refuses_unknown_settings_too() -> None:
    _start(64 * MIB)
    with pytest.raises(ValueError, match="no_such_setting"):
        torch._C._accelerator_setAllocatorSettings("no_such_setting:1")
    torch._C._accelerator_setAllocatorSettings("per_process_memory_fraction:0.5")
    assert torch.sim.get_per_process_memory_fraction() == 0.5


def test_the_environment_is_honoured_under_both_names() -> None:
    script = (
        "import torch\nfrom residency import sim\nsim.enable('64MiB')\n"
        "tensor = torch.empty(5 << 20, dtype=torch.uint8, device='sim')\n"
        "stats = torch.accelerator.memory_stats()\n"
        "print(stats['segment.all.current'], torch.sim.get_per_process_memory_fraction())\n"
    )
    settings = "expandable_segments:True,per_process_memory_fraction:0.75"
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        assert _run(script, **{name: settings}).stdout == "0 0.75\n"


def test_an_environment_that_means_nothing_is_refused_when_the_device_is_enabled() -> None:
    script = (
        "import residency\nfrom residency import sim\n"
        "try:\n    sim.enable('64MiB')\n"
        "except residency.InvalidArgumentError as error:\n    print(error, sim.is_enabled())\n"
    )
    for settings, said in (
        ("no_such_setting:1", "no_such_setting"),
        ("expandable_segments:1", "True"),
    ):
        output = _run(script, PYTORCH_ALLOC_CONF=settings).stdout
        assert output.startswith("PYTORCH_ALLOC_CONF cannot be used: "), output
        assert said in output
        assert output.endswith(" False\n")
