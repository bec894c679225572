"""Settings of the allocator, each figure computed from the rule that CUDA's allocator documents:
splitting, rounding, garbage collection, the memory fraction; and those that mean nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from allocator import GRANULE, KIB, LARGE_SEGMENT, MIB, accelerator, empty, start, stat

import residency
from residency import sim

pytestmark = [pytest.mark.sim, pytest.mark.usefixtures("default_settings_afterwards")]


def _run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )


# -------------------------------------------------------------------------------- sizes of segments


def test_blocks_above_max_split_size_are_not_split_and_serve_close_requests_only() -> None:
    start(256 * MIB, "max_split_size_mb:40")
    assert stat("max_split_size") == 40 * MIB
    large = empty(50 * MIB)
    address = large.data_ptr()
    assert stat("oversize_allocations.current") == stat("oversize_segments.current") == 1
    del large
    small = empty(10 * MIB)  # below the limit: not from an oversized block
    assert accelerator.memory_reserved() == 60 * MIB
    far = empty(64 * MIB)
    close = empty(45 * MIB)  # reused whole: at most 20 MiB too large
    assert close.data_ptr() == address
    assert accelerator.memory_allocated() == (10 + 64 + 50) * MIB
    del far
    other = empty(44 * MIB)  # 64 is not below 44 + 20
    assert accelerator.memory_reserved() == (60 + 64 + 44) * MIB
    del small, close, other
    accelerator.empty_cache()
    assert stat("oversize_allocations.current") == stat("oversize_segments.current") == 0


def test_max_non_split_rounding_widens_what_an_oversized_block_serves() -> None:
    start(256 * MIB, "max_split_size_mb:40,max_non_split_rounding_mb:30")
    large = empty(70 * MIB)
    address = large.data_ptr()
    del large
    assert empty(42 * MIB).data_ptr() == address


def test_an_oversized_block_goes_before_the_whole_cache_does() -> None:
    start(128 * MIB, "max_split_size_mb:40")
    tensors = [empty(30 * MIB), empty(76 * MIB)]
    del tensors
    tensor = empty(50 * MIB)  # 76 is not below 50 + 20, and 30 + 76 + 50 exceed the capacity
    assert accelerator.memory_reserved() == 80 * MIB
    assert stat("num_alloc_retries") == 0
    del tensor


def test_large_segments_have_the_size_that_is_set() -> None:
    start(128 * MIB, "large_segment_size_mb:32")
    tensor = empty(5 * MIB)
    assert accelerator.memory_reserved() == 32 * MIB
    torch.sim.set_allocator_settings("large_segment_size_mb:32,expandable_segments:True")
    grown = empty(33 * MIB)
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
    start(128 * MIB, settings)
    tensor = empty(num_bytes)
    assert accelerator.memory_allocated() == rounded
    assert stat("requested_bytes.all.current") == num_bytes
    del tensor


# ------------------------------------------------------------------------ fraction and old segments


def test_a_memory_fraction_bounds_what_is_reserved() -> None:
    start(64 * MIB)
    torch.sim.set_per_process_memory_fraction(0.5)
    assert torch.sim.get_per_process_memory_fraction() == 0.5
    held = empty(30 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match=r"34\.00 MiB is free\. 32\.00 MiB allowed; "):
        empty(4 * MIB)  # a segment of 20 MiB
    small = empty(KIB)  # one of 2 MiB
    torch.sim.set_per_process_memory_fraction(1.0)
    large = empty(4 * MIB)
    assert accelerator.memory_reserved() == 52 * MIB
    del held, small, large


def test_the_fraction_is_of_the_capacity_and_can_be_an_allocator_setting() -> None:
    start(64 * MIB, "per_process_memory_fraction:0.25")
    assert torch.sim.get_per_process_memory_fraction() == 0.25
    with pytest.raises(torch.OutOfMemoryError, match=r"16\.00 MiB allowed"):
        empty(18 * MIB)
    sim.enable(128 * MIB)
    assert empty(32 * MIB).numel() == 32 * MIB


def test_an_expandable_request_is_held_against_the_fraction_as_a_whole_segment() -> None:
    start(128 * MIB, "expandable_segments:True,per_process_memory_fraction:0.25")
    first = empty(12 * MIB)
    assert accelerator.memory_reserved() == LARGE_SEGMENT
    with pytest.raises(torch.OutOfMemoryError):
        empty(14 * MIB)  # 20 + 14 exceed 32 MiB, although a granule would make 40
    del first


@pytest.mark.parametrize("fraction", [-0.1, 1.5, float("nan")])
def test_a_fraction_outside_0_to_1_is_refused(fraction: float) -> None:
    start(64 * MIB)
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
    start(256 * MIB, settings)
    oldest = empty(30 * MIB)
    del oldest
    old = empty(32 * MIB)
    del old
    held = empty(34 * MIB)
    assert accelerator.memory_reserved() == 96 * MIB
    more = empty(36 * MIB)
    assert accelerator.memory_reserved() == reserved_mib * MIB
    assert stat("num_alloc_retries") == (1 if settings.endswith("0.8") else 0)
    del held, more


# ------------------------------------------------------------------------------------- bad settings

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
    start(128 * MIB)
    torch.sim.set_allocator_settings(good)
    with pytest.raises(residency.InvalidArgumentError, match="cannot be used: .*" + said):
        torch.sim.set_allocator_settings(first + bad)
    assert torch._C._accelerator_getAllocatorSettings() == good
    tensor = empty(5 * MIB)
    assert (stat("segment.all.current"), accelerator.memory_reserved()) == (0, LARGE_SEGMENT)
    assert stat("max_split_size") == 40 * MIB
    assert torch.sim.get_per_process_memory_fraction() == 0.5
    del tensor


def test_settings_of_cuda_without_an_effect_on_bytes_are_accepted() -> None:
    start(64 * MIB)
    settings = (
        "pinned_num_register_threads:128,pinned_use_cuda_host_register:True,"
        "pinned_reserve_segment_size_mb:64,pinned_free_catch_all:False,"
        "release_lock_on_cudamalloc:True,throw_on_cudamalloc_oom:False,"
        "graph_capture_record_stream_reuse:True,backend:native,"
        "release_lock_on_hipmalloc:True,pinned_use_hip_host_register:False"
    )
    torch.sim.set_allocator_settings(settings)
    assert torch._C._accelerator_getAllocatorSettings() == settings


def test_sizes_that_torch_would_not_take_in_one_string_are_brought_back_too() -> None:
    start(256 * MIB, "large_segment_size_mb:32")  # to which torch raises the rounding
    with pytest.raises(residency.InvalidArgumentError):
        torch.sim.set_allocator_settings(
            "large_segment_size_mb:64,max_non_split_rounding_mb:70,no_such_setting:1"
        )
    small = empty(5 * MIB)
    assert accelerator.memory_reserved() == 32 * MIB
    torch.sim.set_allocator_settings("max_split_size_mb:40")
    large = empty(75 * MIB)  # of 76: the last MiB is not split off
    address = large.data_ptr()
    del large
    far = empty(44 * MIB)  # 76 is not below 44 + 32
    assert far.data_ptr() != address
    assert empty(46 * MIB).data_ptr() == address
    del small


def test_torchs_own_setter_refuses_unknown_settings_too() -> None:
    start(64 * MIB)
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
