"""Slabs: no two entries share a byte, every byte comes back, and a tensor owns what it lies on."""

import io
import itertools
import random
import threading

import pytest
import torch
from hypothesis import given, settings, strategies as st

from residency import RefusedError, sim
from residency._storages import strided_as
from residency._transfer import ALIGNMENT, SlabArena, _slab, align_up

SIZES = st.integers(0, 5000)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 50)), max_size=40),
    st.lists(SIZES, max_size=9),
)
def test_entries_never_overlap_and_every_byte_is_either_used_or_free(actions, announced):
    arena = SlabArena()
    arena.reserve(announced)
    live = []
    for is_release, size, index in actions:
        if is_release and live:
            arena.release(live.pop(index % len(live)))
        else:
            live.append(arena.allocate(size))
            assert live[-1].num_bytes >= size
            assert live[-1].offset % ALIGNMENT == 0
        ranges = sorted((id(r.slab), r.offset, r.offset + r.num_bytes) for r in live)
        for (slab, _, stop), (other, start, _) in itertools.pairwise(ranges):
            assert slab != other or stop <= start
        assert arena.used_bytes == sum(r.num_bytes for r in live)
        assert all(r.offset + r.num_bytes <= r.slab.num_bytes for r in live)
    for region in [*live, arena.allocate(1)]:
        arena.release(region)
    assert arena.used_bytes == 0
    assert arena.slab_bytes == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=30))
def test_reserved_slabs_are_powers_of_two_and_exceed_the_entries_by_less_than_the_largest(sizes):
    arena = SlabArena()
    arena.reserve(sizes)
    pinned = arena.slab_bytes
    regions = [arena.allocate(size) for size in sizes]
    assert arena.slab_bytes == pinned
    slabs = {id(r.slab): r.slab for r in regions}.values()
    assert all(slab.num_bytes & (slab.num_bytes - 1) == 0 for slab in slabs)
    assert pinned < sum(map(align_up, sizes)) + max(slab.num_bytes for slab in slabs)


def test_a_large_state_in_like_entries_wastes_little_at_the_ends_of_slabs():
    entries = [300 << 20] * 270  # 79 GiB in entries that do not divide a slab
    assert sum(_slab._slab_sizes(entries)) < 1.05 * sum(entries)


def test_an_arena_that_does_not_pin_takes_just_the_bytes_of_the_entries():
    arena = SlabArena(pin=False)
    arena.reserve([5000, 1])
    regions = [arena.allocate(5000), arena.allocate(1)]
    assert arena.slab_bytes == align_up(5000) + align_up(1)
    assert not regions[0].slab.data.is_pinned()


DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (3, 4, 5)])
def test_a_tensor_has_a_storage_of_its_own_at_offset_zero(dtype, shape):
    arena = SlabArena()
    arena.allocate(1)
    count = torch.Size(shape).numel()
    like = torch.empty(shape, device="meta")
    region = arena.allocate(count * dtype.itemsize)
    tensor = arena.tensor(region, dtype, shape, like.stride())
    assert tensor.shape == torch.Size(shape)
    assert tensor.storage_offset() == 0
    value = torch.ones(shape).to(dtype)
    tensor.copy_(value)
    assert torch.equal(tensor.float() if not dtype.is_complex else tensor.real, torch.ones(shape))
    file = io.BytesIO()
    torch.save(tensor, file)
    assert len(file.getvalue()) < 3000


def test_a_dense_layout_is_kept():
    arena = SlabArena()
    tensor = arena.tensor(arena.allocate(4 * 60), torch.float32, (3, 4, 5), (1, 3, 12))
    tensor.copy_(torch.arange(60.0).view(3, 4, 5))
    assert tensor.stride() == (1, 3, 12)
    assert torch.equal(tensor, torch.arange(60.0).view(3, 4, 5))


def test_a_range_is_used_again_only_when_the_last_view_of_it_is_gone():
    arena = SlabArena()
    keep = arena.allocate(512)
    tensor = arena.tensor(arena.allocate(512), torch.float32, (128,), (1,))
    view = tensor[3:5]
    del tensor
    assert arena.used_bytes == 1024
    view.fill_(3.0)
    del view
    assert arena.used_bytes == 512
    assert keep.num_bytes == 512


def test_a_tensor_outlives_its_arena():
    arena = SlabArena()
    tensor = arena.tensor(arena.allocate(512), torch.float32, (128,), (1,))
    tensor.fill_(2.0)
    del arena
    assert torch.equal(tensor, torch.full((128,), 2.0))


def test_reserving_allocates_at_once():
    arena = SlabArena()
    arena.reserve([5 * 512])
    assert arena.slab_bytes == 8 * 512


def test_room_is_checked_before_anything_is_pinned(monkeypatch):
    monkeypatch.setattr(_slab, "available_host_bytes", lambda: 10_000)
    arena = SlabArena()
    with pytest.raises(RefusedError, match=r"9\.77 KiB"):
        arena.reserve([10_000, 5_000])
    with pytest.raises(RefusedError):
        arena.allocate(20_000)
    assert arena.slab_bytes == 0


def test_what_torch_keeps_for_reuse_makes_room(device, pinned_bytes, monkeypatch):
    size = 1 << 20
    room = pinned_bytes() + size + 4096
    kept = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    monkeypatch.setattr(_slab, "available_host_bytes", lambda: room - read_pinned_bytes())
    arena = SlabArena()
    with pytest.raises(RefusedError, match="are available"):
        arena.reserve([size])
    del kept
    assert room - read_pinned_bytes() < size  # torch has it, and the system does not
    arena.reserve([size])
    assert arena.slab_bytes == size


def read_pinned_bytes():
    if torch.cuda.is_available():
        return torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    return sim.pinned_memory_stats()["pinned_bytes.current"]


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError])
def test_memory_that_cannot_be_locked_is_refused_and_the_arena_stays_usable(monkeypatch, kind):
    arena = SlabArena()
    kept = arena.allocate(512)

    def fail(num_bytes):
        raise kind("CUDA error: out of memory")

    with monkeypatch.context() as broken:
        broken.setattr(_slab._pinned, "allocate_pinned", fail)
        with pytest.raises(RefusedError, match="page-locked"):
            arena.allocate(2048)
    assert arena.used_bytes == kept.num_bytes
    assert arena.allocate(2048).num_bytes == 2048


def test_a_slab_is_pinned_where_there_is_an_accelerator(device, pinned_bytes):
    before = pinned_bytes()
    arena = SlabArena()
    tensor = arena.tensor(arena.allocate(512), torch.float32, (128,), (1,))
    assert device.type != "cpu"
    assert tensor.is_pinned()
    assert pinned_bytes() - before == 512


def test_whatever_comes_back_its_longest_stretch_is_one_range_again():
    for chosen in itertools.product([False, True], repeat=6):
        slab = _slab.Slab(6 * ALIGNMENT, pin=False)
        offsets = slab.take(ALIGNMENT, len(chosen))
        slab.put_back([(o, ALIGNMENT) for o, free in zip(offsets, chosen, strict=True) if free])
        stretches = [list(group) for free, group in itertools.groupby(chosen) if free]
        longest = max(map(len, stretches), default=0)
        assert slab.take((longest + 1) * ALIGNMENT) == [], chosen
        if longest:
            (start,) = slab.take(longest * ALIGNMENT)
            assert all(chosen[start // ALIGNMENT :][:longest]), chosen


@pytest.mark.parametrize("act", ["take", "put_back"])
def test_a_thread_that_takes_a_range_within_another_ones_call_gets_its_own(act):
    """A step moves states while another thread asks for a snapshot's tree."""
    slab = _slab.Slab(2048, pin=False)
    assert slab.take(512) == [0]
    taken = []
    other = threading.Thread(target=lambda: taken.append(slab.take(512)))

    class Free(list):
        def __iter__(self):
            found = list(super().__iter__())
            if not other.ident:
                other.start()
                other.join(0.2)  # it waits for this call where there is a lock
            return iter(found)

    slab._free = Free(slab._free)
    mine = slab.take(512) if act == "take" else slab.put_back([(0, 512)])
    other.join()
    assert mine not in taken
    assert slab.free_bytes == 2048 - 512 * (3 if act == "take" else 1)


def test_ranges_that_are_taken_together_are_those_that_are_taken_one_at_a_time():
    chance = random.Random(7)
    for _ in range(50):
        sizes = [chance.choice([0, 100, 512, 900, 5000]) for _ in range(chance.randrange(1, 40))]
        arenas = [SlabArena(pin=False, reuse=True) for _ in range(2)]
        first = chance.choice([600, 3000, 9000])
        for arena in arenas:
            arena.reserve([first])
            arena.reserve(sizes)
            gaps = arena.allocate_all([512] * 6)
            for region in gaps[::2]:
                arena.release(region)
        together = arenas[0]._find(sizes)
        alone = [arenas[1].find_room(size) for size in sizes]
        assert [_place(arenas[0], each) for each in together] == [
            _place(arenas[1], each) for each in alone
        ]


def _place(arena, region):
    return region and (arena._slabs.index(region.slab), region.offset, region.num_bytes)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64, torch.bfloat16])
def test_views_lie_at_the_beginning_of_their_regions_wherever_those_are(dtype):
    like = torch.empty(3, 5, dtype=dtype)
    arena = SlabArena(pin=False, reuse=True)
    for _ in range(3):
        arena.reserve([512] * 4)
    regions = arena.allocate_all([like.nbytes] * 12)
    for order in (regions, regions[::-1], regions[::2], regions[5:6], [regions[0], *regions[2:]]):
        views = _slab.views_in(order, like)
        assert [view.data_ptr() for view in views] == [
            region.slab.data.data_ptr() + region.offset for region in order
        ]
        assert {(view.dtype, view.shape, view.stride()) for view in views} == {strided_as(like)}
