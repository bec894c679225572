"""What cub's algorithms ask for, by the headers of CCCL 3.0: part by part, for cards of three
generations.
"""

from __future__ import annotations

import pytest

from residency import sim
from residency_sim import _backend

pytestmark = pytest.mark.sim

A100, RTX4090, H100, B200 = 80, 89, 90, 100
LONG, INT = 8, 4
BEFORE = 32  # states before the first tile's


@pytest.fixture(autouse=True, scope="module")
def device() -> None:
    sim.enable()


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _parts(*num_bytes: int) -> int:
    """Returns what cub adds such parts up to."""
    return 255 + sum(_ceil(part, 256) * 256 for part in num_bytes)


def _states(count: int, tile: int, item: int) -> int:
    """Returns the states of a scan's tiles, which are added up before they are a part."""
    return _parts((_ceil(count, tile) + BEFORE) * 2 * item)


@pytest.mark.parametrize(
    ("card", "key", "value", "tile"),
    [
        (A100, LONG, LONG, 384 * 10),  # 21 items of four bytes
        (A100, INT, LONG, 384 * 8),  # 17
        (A100, INT, 0, 384 * 21),
        (RTX4090, LONG, LONG, 384 * 10),
        (H100, LONG, LONG, 384 * 12),  # 24
        (H100, LONG, 0, 384 * 15),  # 30
        (H100, INT, LONG, 384 * 14),  # 29
        (H100, INT, INT, 384 * 17),
        (H100, INT, 0, 384 * 19),
        (H100, 2, LONG, 512 * 11),  # 23
        (H100, 1, LONG, 384 * 9),  # 18
        (H100, 2, 0, 512 * 19),
        (B200, 2, 0, 384 * 20),
        (B200, 2, LONG, 512 * 11),
        (B200, LONG, LONG, 384 * 12),
    ],
)
@pytest.mark.parametrize("count", [5_000, 100_003])
def test_a_sort_sweeps_once_for_eight_bits_in_tiles_of_its_card(
    card: int, key: int, value: int, tile: int, count: int
) -> None:
    passes = key
    copied = count if passes > 1 else 0
    expected = _parts(
        passes * 256 * LONG,
        _ceil(count, tile) * 256 * INT,
        copied * key,
        copied * value,
        passes * INT,
    )
    assert _backend.core().sort_scratch_bytes(card, count, 8 * key, key, value) == expected


def test_a_sort_of_one_tile_takes_a_byte_and_short_keys_of_older_cards_are_not_swept() -> None:
    sort = _backend.core().sort_scratch_bytes
    assert sort(H100, 256 * 19, 32, INT, 0) == 1
    assert sort(H100, 256 * 9 + 1, 64, LONG, LONG) > 1
    assert sort(A100, 10_000, 16, 2, LONG) == _parts(2 * 10_000, LONG * 10_000)


@pytest.mark.parametrize(
    ("card", "of_longs", "of_ints"),
    [
        (A100, 288 * 11, 320 * 12),
        (RTX4090, 128 * 7, 128 * 15),
        (H100, 224 * 12, 128 * 24),
        (B200, 320 * 11, 416 * 19),
    ],
)
def test_a_scan_keeps_a_state_for_each_tile(card: int, of_longs: int, of_ints: int) -> None:
    scan = _backend.core().scan_scratch_bytes
    for count in (1, 4096, 1_000_000):
        assert scan(card, count, LONG) == _parts(_states(count, of_longs, LONG))
        assert scan(card, count, INT) == _parts(_states(count, of_ints, INT))
        of_halves = _ceil(count, 128 * 30) + BEFORE  # a word and two sums for each, apart
        apart = _parts(of_halves * INT, of_halves * 2, of_halves * 2)
        assert scan(card, count, 2) == _parts(apart)


@pytest.mark.parametrize(
    ("card", "selected", "unique", "by_key"),
    [
        (A100, 384 * 6, 192 * 7, 256 * 15),
        (RTX4090, 128 * 5, 64 * 5, 256 * 9),
        (H100, 384 * 11, 448 * 11, 288 * 14),
        (B200, 320 * 11, 576 * 7, 224 * 20),
    ],
)
def test_what_selects_by_flag_or_key_scans_its_tiles(
    card: int, selected: int, unique: int, by_key: int
) -> None:
    core = _backend.core()
    for count in (1, 4096, 4_194_304):
        assert core.select_scratch_bytes(card, count) == _parts(_states(count, selected, INT))
        found = core.unique_by_key_scratch_bytes(card, count, LONG)
        assert found == _parts(_states(count, unique, LONG))
        tiles = _ceil(count, by_key)
        expected = _parts((tiles + BEFORE) * 16, (tiles + 1) * INT)
        assert core.scan_by_key_scratch_bytes(card, count) == expected


def test_a_sum_keeps_a_count_for_five_times_the_blocks_that_fit() -> None:
    sums = _backend.core().sum_scratch_bytes
    assert sums(4096, 132, 2048) == 1
    assert sums(4097, 132, 2048) == _parts(132 * 8 * 5 * INT)
    assert sums(4097, 128, 1536) == _parts(128 * 6 * 5 * INT)
