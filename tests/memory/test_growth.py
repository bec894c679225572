"""Growth: found where it is steady, and nowhere else."""

from __future__ import annotations

import random

import pytest

from residency._memory._growth import find_growth, growing_classes

MIB = 1 << 20
GIB = 1 << 30


def test_the_published_run_without_the_fix_grows_and_the_one_with_it_does_not() -> None:
    # Trinity-RFT #541: reserved after the actor's update, at steps 1, 5 and 9.
    without = find_growth("reserved", [30.1 * GIB, 34.0 * GIB, 38.2 * GIB], [1, 5, 9])
    fixed = find_growth("reserved", [32.9 * GIB, 32.9 * GIB, 32.9 * GIB], [1, 5, 9])
    assert without is not None
    assert without.is_growing
    assert without.bytes_per_visit == pytest.approx(1.0125 * GIB)
    assert str(without) == "reserved +1.01 GiB per visit over 3 visits"
    assert fixed is not None
    assert not fixed.is_growing


def test_the_first_half_is_warm_up() -> None:
    growth = find_growth("held", [0, 100 * MIB, 200 * MIB, 300 * MIB] + [400 * MIB] * 6)
    assert growth is not None
    assert (growth.bytes_per_visit, growth.num_visits, growth.is_growing) == (0, 5, False)


def test_one_outlier_does_not_hide_a_leak_nor_make_one() -> None:
    leak = [float(i * MIB) for i in range(40)]
    leak[30] = 0
    found = find_growth("held", leak)
    assert found is not None
    assert found.is_growing
    assert found.bytes_per_visit == pytest.approx(MIB)
    flat = [float(GIB)] * 40
    flat[35] = 9.0 * GIB
    found = find_growth("held", flat)
    assert found is not None
    assert not found.is_growing


def test_noise_is_no_growth() -> None:
    generator = random.Random(0)
    for _ in range(50):
        noise = [GIB + generator.randrange(512 * MIB) for _ in range(60)]
        found = find_growth("returnable", noise)
        assert found is not None
        assert not found.is_growing


def test_a_see_saw_is_no_growth() -> None:
    found = find_growth("stuck", [GIB, 2 * GIB] * 20)
    assert found is not None
    assert not found.is_growing


def test_a_leak_of_a_little_a_step_is_found_among_many_visits() -> None:
    found = find_growth("held", [GIB + i * 4096 for i in range(5000)])
    assert found is not None
    assert found.is_growing
    assert found.bytes_per_visit == pytest.approx(4096, rel=0.01)


def test_too_few_visits_say_nothing() -> None:
    assert find_growth("held", [0, GIB]) is None
    assert find_growth("held", []) is None


def test_the_classes_that_grow_are_named_fastest_first() -> None:
    series = {
        "held": [GIB + i * MIB for i in range(12)],
        "stuck": [float(i * 5 * MIB) for i in range(12)],
        "returnable": [8.0 * MIB] * 12,
    }
    assert [growth.name for growth in growing_classes(series)] == ["stuck", "held"]
