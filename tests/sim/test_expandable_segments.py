"""Expandable segments, each figure computed from the rule that CUDA's allocator documents."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from allocator import (
    GRANULE,
    KIB,
    LARGE_SEGMENT,
    MIB,
    SMALL_SEGMENT,
    accelerator,
    empty,
    start,
    stat,
)

from residency import sim

pytestmark = [pytest.mark.sim, pytest.mark.usefixtures("default_settings_afterwards")]


def test_an_expandable_segment_grows_by_whole_granules_at_its_end() -> None:
    start(128 * MIB, "expandable_segments:True")
    first = empty(5 * MIB)
    assert accelerator.memory_reserved() == LARGE_SEGMENT
    second = empty(20 * MIB)  # 15 MiB are free behind the first: one granule more
    assert accelerator.memory_reserved() == 2 * LARGE_SEGMENT
    assert second.data_ptr() == first.data_ptr() + 5 * MIB
    small = empty(KIB)
    assert accelerator.memory_reserved() == 2 * LARGE_SEGMENT + SMALL_SEGMENT
    stats = accelerator.memory_stats()
    assert stats["num_device_alloc"] == 3
    assert stats["segment.all.allocated"] == 0
    assert stats["inactive_split.all.allocated"] == stats["inactive_split_bytes.all.current"] == 0
    del small


def test_an_expandable_segment_splits_off_any_remainder_of_512_bytes() -> None:
    start(128 * MIB, "expandable_segments:True")
    tensor = empty(20 * MIB - GRANULE)  # without the setting it would be charged 20 MiB
    assert accelerator.memory_allocated() == 20 * MIB - GRANULE
    del tensor


def test_granules_that_are_wholly_free_are_unmapped_also_in_the_middle() -> None:
    start(128 * MIB, "expandable_segments:True")
    # [0, 10) [10, 50) [50, 60) over granules of 20 MiB: only [20, 40) lies wholly in the second.
    tensors = [empty(10 * MIB), empty(40 * MIB), empty(10 * MIB)]
    begin = tensors[0].data_ptr()
    tensors[1] = torch.empty(0)
    assert accelerator.memory_reserved() == 60 * MIB
    accelerator.empty_cache()
    assert accelerator.memory_reserved() == 40 * MIB
    assert accelerator.get_memory_info() == (88 * MIB, 128 * MIB)
    assert stat("num_device_free") == 1
    assert stat("inactive_split_bytes.all.current") == 0  # stuck bytes are not told, as on CUDA
    again = empty(40 * MIB)  # the least address with room: free, unmapped and free again
    assert again.data_ptr() == begin + 10 * MIB
    assert accelerator.memory_reserved() == 60 * MIB
    del tensors, again
    accelerator.empty_cache()
    assert accelerator.memory_reserved() == 0


def test_best_fit_spares_the_end_that_can_grow() -> None:
    start(128 * MIB, "expandable_segments:True")
    tensors = [empty(4 * MIB), empty(6 * MIB), empty(5 * MIB)]  # and 5 MiB free at the end
    hole = tensors[1].data_ptr()
    tensors[1] = torch.empty(0)
    assert empty(5 * MIB).data_ptr() == hole


def test_a_smaller_request_takes_the_least_hole_of_an_expandable_segment() -> None:
    start(128 * MIB, "expandable_segments:True")
    sizes = (3, 2, 4, 2, 2)
    tensors = [empty(size * MIB) for size in sizes]
    holes = [tensors[0].data_ptr(), tensors[2].data_ptr()]
    tensors[0] = tensors[2] = torch.empty(0)
    assert empty(3 * MIB - 5).data_ptr() == holes[0]


def test_each_stream_has_an_expandable_segment_of_its_own() -> None:
    start(128 * MIB, "expandable_segments:True")
    stream = torch.Stream(device="sim")
    ours = empty(5 * MIB)
    with stream:
        theirs = empty(5 * MIB)
    assert accelerator.memory_reserved() == 2 * LARGE_SEGMENT
    assert abs(theirs.data_ptr() - ours.data_ptr()) >= 128 * MIB  # ranges wider than the device


def test_other_streams_granules_are_unmapped_before_a_request_fails() -> None:
    start(64 * MIB, "expandable_segments:True")
    cached = empty(40 * MIB)
    del cached
    with torch.Stream(device="sim"):
        tensor = empty(40 * MIB)
    assert accelerator.memory_reserved() == 40 * MIB
    assert (stat("num_alloc_retries"), stat("num_ooms")) == (1, 0)
    del tensor


def test_running_out_of_memory_leaves_an_expandable_segment_usable() -> None:
    start(64 * MIB, "expandable_segments:True")
    held = empty(30 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 32\.00 MiB"):
        empty(31 * MIB)  # 10 MiB are free and 21 more need two granules of 20 MiB
    assert (accelerator.memory_allocated(), stat("num_ooms")) == (30 * MIB, 1)
    assert accelerator.memory_reserved() == 40 * MIB
    more = empty(30 * MIB)
    assert accelerator.memory_reserved() == 60 * MIB
    del held, more


def test_granules_count_in_a_shared_capacity() -> None:
    start(64 * MIB, "expandable_segments:True")
    sim.enable(64 * MIB, share="expandable-segments")
    tensor = empty(30 * MIB)
    assert accelerator.get_memory_info() == (24 * MIB, 64 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        empty(40 * MIB)
    assert accelerator.get_memory_info() == (24 * MIB, 64 * MIB)
    del tensor
    accelerator.empty_cache()
    assert accelerator.get_memory_info() == (64 * MIB, 64 * MIB)


def test_fresh_and_reused_granules_hold_nan() -> None:
    start(64 * MIB, "expandable_segments:True")
    for release in (False, True, True):
        tensor = torch.empty(2 * MIB, device="sim")
        assert tensor.isnan().all().item()
        tensor.zero_()
        del tensor
        if release:
            accelerator.empty_cache()


def test_unmapped_granules_leave_nothing_for_the_race_checker_to_find() -> None:
    start(64 * MIB, "expandable_segments:True")
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
        start(64 * MIB, "expandable_segments:True")
        sim.enable(64 * MIB, check_races=True, schedule=schedule)
        tensor = torch.ones(2 * MIB, device="sim")
        with pytest.raises(sim.RaceError), torch.Stream(device="sim"):
            tensor.mul_(2)
        del tensor


def test_expandable_segments_in_dry_mode_take_no_memory_of_the_host() -> None:
    start(64 * MIB, "expandable_segments:True")
    sim.enable("200GiB", dry=True)
    tensors = [empty(60 << 30), empty((30 << 30) + 1)]
    granules = -(-((90 << 30) + GRANULE) // LARGE_SEGMENT)
    assert accelerator.memory_reserved() == granules * LARGE_SEGMENT
    assert tensors[1].data_ptr() == tensors[0].data_ptr() + (60 << 30)
    del tensors


def test_turned_off_the_setting_leaves_expandable_segments_alone() -> None:
    start(128 * MIB, "expandable_segments:True")
    grown = empty(5 * MIB)
    address = grown.data_ptr()
    del grown
    torch.sim.set_allocator_settings("expandable_segments:False")
    stock = empty(20 * MIB)
    assert stock.data_ptr() != address
    assert accelerator.memory_reserved() == 2 * LARGE_SEGMENT
    assert stat("segment.all.current") == 1
    torch.sim.set_allocator_settings("expandable_segments:True")
    assert empty(4 * MIB).data_ptr() == address
    accelerator.empty_cache()
    assert accelerator.memory_reserved() == LARGE_SEGMENT
