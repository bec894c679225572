"""Device memory: CUDA's rules for rounding, segments, reuse and release, and their figures."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

KIB = 1 << 10
MIB = 1 << 20
GRANULE = 512
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
CAPACITY = 64 * MIB
pytestmark = [
    pytest.mark.sim,
    pytest.mark.sim_device(capacity=CAPACITY, schedule="late", check_races=False),
]
accelerator = torch.accelerator
KINDS = ("all", "small_pool", "large_pool")
FIGURES = ("current", "peak", "allocated", "freed")
# As documented for torch.accelerator.memory_stats.
KEYS = {
    f"{name}.{kind}.{figure}"
    for name in (
        "active",
        "active_bytes",
        "allocated_bytes",
        "allocation",
        "inactive_split",
        "inactive_split_bytes",
        "requested_bytes",
        "reserved_bytes",
        "segment",
    )
    for kind in KINDS
    for figure in FIGURES
} | {f"oversize_{name}.{figure}" for name in ("allocations", "segments") for figure in FIGURES}
COUNTS = {
    "max_split_size",
    "num_alloc_retries",
    "num_device_alloc",
    "num_device_free",
    "num_ooms",
    "num_sync_all_streams",
}


def _empty(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="sim")


def _round(num_bytes: int) -> int:
    return -(-num_bytes // GRANULE) * GRANULE


# ----------------------------------------------------------------------------------------- rounding


@pytest.mark.parametrize("num_bytes", [1, 511, 512, 513, 4096, 5000, MIB - 1, MIB])
def test_a_small_block_is_rounded_up_to_512_bytes_in_a_2_mib_segment(num_bytes: int) -> None:
    tensor = _empty(num_bytes)
    assert accelerator.memory_allocated() == _round(num_bytes)
    assert accelerator.memory_reserved() == SMALL_SEGMENT
    stats = accelerator.memory_stats()
    assert stats["requested_bytes.all.current"] == num_bytes
    assert stats["allocated_bytes.small_pool.current"] == _round(num_bytes)
    assert stats["allocated_bytes.large_pool.current"] == 0
    assert tensor.data_ptr() % GRANULE == 0


@pytest.mark.parametrize(
    ("num_bytes", "segment_bytes"),
    [
        (MIB + 1, LARGE_SEGMENT),
        (10 * MIB - GRANULE, LARGE_SEGMENT),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (15 * MIB + 1, 16 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_a_large_block_gets_20_mib_or_a_multiple_of_2_mib(
    num_bytes: int, segment_bytes: int
) -> None:
    tensor = _empty(num_bytes)
    assert accelerator.memory_reserved() == segment_bytes
    assert accelerator.memory_stats()["segment.large_pool.current"] == 1
    del tensor


@pytest.mark.parametrize(
    ("num_bytes", "charged_bytes"),
    [(15 * MIB + 1, 16 * MIB), (15 * MIB, 16 * MIB), (11 * MIB - GRANULE, 11 * MIB - GRANULE)],
)
def test_a_remainder_of_at_most_1_mib_is_not_split_off_but_charged(
    num_bytes: int, charged_bytes: int
) -> None:
    tensor = _empty(num_bytes)
    stats = accelerator.memory_stats()
    assert accelerator.memory_allocated() == charged_bytes
    assert stats["requested_bytes.all.current"] == num_bytes
    left = accelerator.memory_reserved() - charged_bytes
    assert stats["inactive_split_bytes.all.current"] == left
    assert stats["inactive_split.all.current"] == (1 if left else 0)
    del tensor


def test_a_tensor_without_elements_takes_nothing() -> None:
    tensor = torch.empty(0, 5, device="sim")
    assert accelerator.memory_reserved() == 0
    assert tensor.data_ptr() == 0


# ------------------------------------------------------------------------- splitting and coalescing


def test_neighbours_are_cut_from_one_segment_and_join_again_when_freed() -> None:
    tensors = [_empty(512 * KIB) for _ in range(4)]
    assert accelerator.memory_reserved() == SMALL_SEGMENT
    starts = [tensor.data_ptr() for tensor in tensors]
    assert starts == [starts[0] + i * 512 * KIB for i in range(4)]
    for index, num_splits in ((1, 1), (3, 2), (2, 1)):  # alone, alone, joining both
        tensors[index] = torch.empty(0)
        assert accelerator.memory_stats()["inactive_split.all.current"] == num_splits
    assert accelerator.memory_stats()["inactive_split_bytes.all.current"] == 3 * 512 * KIB
    tensors[0] = torch.empty(0)
    assert accelerator.memory_stats()["inactive_split.all.current"] == 0
    whole = [_empty(MIB), _empty(MIB)]
    assert accelerator.memory_reserved() == SMALL_SEGMENT
    assert sorted(t.data_ptr() for t in whole) == [starts[0], starts[0] + MIB]


def test_the_least_block_that_fits_is_taken() -> None:
    sizes = (64 * KIB, 512, 16 * KIB, 512, 32 * KIB, 512)
    tensors = [_empty(size) for size in sizes]
    middle = tensors[2].data_ptr()
    for index in (0, 2, 4):
        tensors[index] = torch.empty(0)
    assert _empty(10 * KIB).data_ptr() == middle


def test_small_requests_are_not_served_from_large_segments() -> None:
    large = _empty(5 * MIB)
    del large
    small = _empty(KIB)
    assert accelerator.memory_reserved() == LARGE_SEGMENT + SMALL_SEGMENT
    del small


def test_a_freed_block_is_reused_on_its_own_stream_only() -> None:
    stream = torch.Stream(device="sim")
    first = _empty(KIB)
    address = first.data_ptr()
    del first
    with stream:
        elsewhere = _empty(KIB)
    assert elsewhere.data_ptr() != address
    assert accelerator.memory_reserved() == 2 * SMALL_SEGMENT
    assert _empty(KIB).data_ptr() == address


def test_record_stream_defers_reuse_until_the_stream_has_passed() -> None:
    stream = torch.Stream(device="sim")
    source, host = _empty(KIB), torch.empty(KIB, dtype=torch.uint8).pin_memory()
    address = source.data_ptr()
    stream.wait_stream(accelerator.current_stream())
    with stream:
        host.copy_(source, non_blocking=True)
    source.record_stream(stream)
    del source
    stats = accelerator.memory_stats()
    assert stats["allocated_bytes.all.current"] == 0
    assert stats["active_bytes.all.current"] == KIB
    assert _empty(KIB).data_ptr() != address
    stream.synchronize()
    assert _empty(KIB).data_ptr() == address
    assert accelerator.memory_stats()["active_bytes.all.current"] == 0


def test_record_stream_of_the_own_stream_defers_nothing() -> None:
    tensor = _empty(KIB)
    address = tensor.data_ptr()
    tensor.record_stream(accelerator.current_stream())
    del tensor
    assert _empty(KIB).data_ptr() == address


# ----------------------------------------------------------------------------- capacity and release


def test_memory_info_counts_reserved_bytes_as_taken() -> None:
    assert accelerator.get_memory_info() == (CAPACITY, CAPACITY)
    tensor = _empty(KIB)
    assert accelerator.get_memory_info() == (CAPACITY - SMALL_SEGMENT, CAPACITY)
    del tensor
    assert accelerator.get_memory_info() == (CAPACITY - SMALL_SEGMENT, CAPACITY)
    accelerator.empty_cache()
    assert accelerator.get_memory_info() == (CAPACITY, CAPACITY)


def test_the_whole_capacity_can_be_taken_and_not_a_segment_more() -> None:
    whole = _empty(CAPACITY)
    assert accelerator.get_memory_info() == (0, CAPACITY)
    with pytest.raises(torch.OutOfMemoryError):
        _empty(1)
    del whole
    assert _empty(1).numel() == 1


def test_cached_segments_are_given_back_before_a_request_fails() -> None:
    cached = _empty(40 * MIB)
    del cached
    tensor = _empty(50 * MIB)
    stats = accelerator.memory_stats()
    assert stats["num_alloc_retries"] == 1
    assert stats["num_ooms"] == 0
    assert stats["num_device_free"] == 1
    assert accelerator.memory_reserved() == 50 * MIB
    del tensor


def test_running_out_of_memory_says_all_figures() -> None:
    held, cached = _empty(20 * MIB), [_empty(KIB), _empty(MIB)]
    del cached[1]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        _empty(50 * MIB + 1)
    message = str(caught.value)
    for figure in (
        "Tried to allocate 52.00 MiB",
        "total capacity of 64.00 MiB",
        "of which 42.00 MiB is free",
        "20.00 MiB is allocated",
        "2.00 MiB is reserved by PyTorch but unallocated",
    ):
        assert figure in message, message
    assert accelerator.memory_stats()["num_ooms"] == 1
    assert accelerator.memory_allocated() == 20 * MIB + KIB
    del held


def test_an_operation_that_runs_out_of_memory_leaves_the_device_usable() -> None:
    tensor = torch.ones(8 * MIB, device="sim")  # 32 MiB
    with pytest.raises(torch.OutOfMemoryError):
        torch.stack([tensor, tensor])
    assert accelerator.memory_allocated() == 32 * MIB
    tensor.add_(1.0)
    assert tensor.sum().item() == 2.0 * 8 * MIB


def test_empty_cache_gives_back_only_segments_that_are_wholly_free() -> None:
    kept = _empty(KIB)
    neighbour, small, large = _empty(KIB), [_empty(MIB) for _ in range(3)], _empty(30 * MIB)
    assert accelerator.memory_reserved() == 2 * SMALL_SEGMENT + 30 * MIB
    del neighbour, small, large
    assert accelerator.memory_reserved() == 2 * SMALL_SEGMENT + 30 * MIB
    accelerator.empty_cache()
    assert accelerator.memory_reserved() == SMALL_SEGMENT
    assert accelerator.memory_stats()["inactive_split_bytes.all.current"] == SMALL_SEGMENT - KIB
    del kept
    accelerator.empty_cache()
    assert accelerator.memory_reserved() == 0


# ------------------------------------------------------------------------------------------ figures


def test_memory_stats_have_the_documented_keys() -> None:
    assert set(accelerator.memory_stats()) == KEYS | COUNTS


def test_memory_stats_follow_their_definitions() -> None:
    tensors = [_empty(size) for size in (100, 700, 3 * MIB, 5 * MIB)]
    del tensors[1], tensors[1]
    stats = accelerator.memory_stats()
    for name in ("allocation", "allocated_bytes", "requested_bytes", "active", "active_bytes"):
        for kind in KINDS:
            figures = {figure: stats[f"{name}.{kind}.{figure}"] for figure in FIGURES}
            assert figures["current"] == figures["allocated"] - figures["freed"], (name, kind)
            assert figures["peak"] >= figures["current"], (name, kind)
    for key in KEYS:
        if ".all." in key:
            name, _, figure = key.split(".")
            parts = [stats[f"{name}.{kind}.{figure}"] for kind in KINDS[1:]]
            assert stats[key] == sum(parts) or figure == "peak", key
    assert stats["allocation.all.current"] == 2
    assert stats["allocation.all.allocated"] == 4
    assert stats["requested_bytes.all.current"] == 100 + 5 * MIB
    assert stats["requested_bytes.all.peak"] == 800 + 8 * MIB
    assert stats["allocated_bytes.small_pool.peak"] == 512 + 1024
    assert stats["reserved_bytes.small_pool.peak"] == SMALL_SEGMENT
    assert stats["reserved_bytes.large_pool.current"] == LARGE_SEGMENT
    assert stats["num_device_alloc"] == 2
    assert stats["num_ooms"] == stats["num_alloc_retries"] == stats["num_device_free"] == 0


def test_resetting_peaks_starts_them_at_what_is_held() -> None:
    held, freed = _empty(4 * MIB), _empty(24 * MIB)
    del freed
    assert accelerator.max_memory_allocated() == 28 * MIB
    assert accelerator.max_memory_reserved() == LARGE_SEGMENT + 24 * MIB
    accelerator.empty_cache()
    accelerator.reset_peak_memory_stats()
    assert accelerator.max_memory_allocated() == 4 * MIB
    assert accelerator.max_memory_reserved() == LARGE_SEGMENT
    del held


def test_resetting_accumulated_figures_keeps_current_ones() -> None:
    held, freed = _empty(KIB), _empty(KIB)
    del freed
    with pytest.raises(torch.OutOfMemoryError):
        _empty(CAPACITY + 1)
    accelerator.reset_accumulated_memory_stats()
    stats = accelerator.memory_stats()
    assert stats["allocated_bytes.all.current"] == KIB
    for key in ("allocated_bytes.all.allocated", "allocated_bytes.all.freed", "num_ooms"):
        assert stats[key] == 0, key
    del held


# ------------------------------------------------------------------------------------------- poison


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_fresh_memory_holds_nan(dtype: torch.dtype) -> None:
    assert torch.empty(1000, dtype=dtype, device="sim").isnan().all().item()


def test_reused_memory_holds_nan_again() -> None:
    tensor = torch.ones(1000, device="sim")
    address = tensor.data_ptr()
    del tensor
    again = torch.empty(1000, device="sim")
    assert again.data_ptr() == address
    assert again.isnan().all().item()


def test_freed_memory_holds_nan_for_whoever_still_looks() -> None:
    kept = torch.ones(1000, device="sim")
    alias = torch.empty(0, device="sim")
    alias.set_(kept.untyped_storage(), 0, (1000,))
    assert alias.sum().item() == 1000.0
    stale = kept.untyped_storage()
    stale.resize_(0)
    assert accelerator.memory_allocated() == 0
    stale.resize_(4000)
    assert alias.isnan().all().item()


# --------------------------------------------------------------------------------------- properties

SIZES = st.one_of(
    st.integers(1, 3000), st.integers(MIB - 600, MIB + 600), st.integers(3 * MIB, 23 * MIB)
)
# Allocate on one of two streams, free the n-th, free it after a recorded use, empty the cache.
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), SIZES, st.integers(0, 1)),
        st.tuples(st.just("free"), st.integers(0, 50), st.booleans()),
        st.tuples(st.just("empty"), st.just(0), st.just(0)),
    ),
    max_size=40,
)


def _check_invariants(live: list[torch.Tensor]) -> None:
    requested = sum(tensor.numel() for tensor in live)
    least = sum(_round(tensor.numel()) for tensor in live)
    stats = accelerator.memory_stats()
    allocated, reserved = accelerator.memory_allocated(), accelerator.memory_reserved()
    assert least <= allocated <= least + MIB * len(live)
    assert stats["allocation.all.current"] == len(live)
    assert stats["requested_bytes.all.current"] >= requested  # what drains is still counted
    assert allocated <= stats["active_bytes.all.current"] <= reserved <= CAPACITY
    assert accelerator.get_memory_info()[0] == CAPACITY - reserved
    inactive = stats["inactive_split_bytes.all.current"]
    assert stats["active_bytes.all.current"] + inactive <= reserved
    spans = sorted((t.data_ptr(), t.data_ptr() + _round(t.numel())) for t in live)
    for (_, end), (start, _) in itertools.pairwise(spans):
        assert end <= start


@pytest.fixture(params=[False, True], ids=["segments", "expandable"])
def expands(request: pytest.FixtureRequest, sim_device: torch.device) -> Iterator[bool]:
    torch.sim.set_allocator_settings(f"expandable_segments:{request.param}")
    yield request.param
    torch.sim.set_allocator_settings("expandable_segments:False")


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(actions=ACTIONS)
def test_bytes_are_conserved_whatever_is_allocated_and_freed(
    expands: bool, actions: list[tuple[str, int, int]]
) -> None:
    least_when_full = CAPACITY // (8 if expands else 4)  # a granule stays mapped for any one block
    streams = [torch.accelerator.current_stream(), torch.Stream(device="sim")]
    live: list[torch.Tensor] = []
    for action, number, choice in actions:
        if action == "allocate":
            with streams[choice]:
                try:
                    live.append(_empty(number))
                except torch.OutOfMemoryError:
                    assert accelerator.memory_allocated() + number > least_when_full
        elif action == "free" and live:
            tensor = live.pop(number % len(live))
            if choice:
                tensor.record_stream(streams[1])
            del tensor
        elif action == "empty":
            accelerator.empty_cache()
        _check_invariants(live)
    live.clear()
    accelerator.synchronize()
    accelerator.empty_cache()
    stats = accelerator.memory_stats()
    for key in KEYS:
        if key.endswith(".current"):
            assert stats[key] == 0, key
