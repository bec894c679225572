"""The bucket that is offered for a state of which the slots are to take a part."""

from __future__ import annotations

import pytest

from residency._transfer._buckets import fitting_bucket

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("state_bytes", "num_slots", "expected"),
    [
        (0, 3, 0),
        (12 * KIB - 1, 3, 0),  # 512 B would be too little for a copy
        (12 * KIB, 3, KIB),
        (24 * KIB - 1, 3, KIB),
        (24 * KIB, 3, 2 * KIB),
        (8 * KIB, 1, 2 * KIB),
        (1 << 40, 3, 128 * MIB),
    ],
)
def test_all_slots_take_a_quarter_of_the_state_at_most(
    state_bytes: int, num_slots: int, expected: int
) -> None:
    assert fitting_bucket(state_bytes, num_slots) == expected
