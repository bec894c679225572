"""Blocks of 96 MiB: a step takes the time that the rule says, on the simulated clock, and the least
capacity of a run of random lengths falls by all units but the slots.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from benchmarks import bench_frozen

from residency._units import MIB

pytestmark = [pytest.mark.sim, pytest.mark.whole]


@pytest.fixture(autouse=True)
def _nothing_left(device: torch.device) -> Iterator[None]:
    yield
    gc.collect()


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("tokens", [1024, 4096, 8192])
@pytest.mark.parametrize("link", bench_frozen.LINKS)
def test_a_block_takes_the_longer_of_its_computation_and_its_copy(
    link: int, tokens: int, recomputes: bool
) -> None:
    stock = bench_frozen.seconds(tokens, link, slots=0, recomputes=recomputes)
    streamed = bench_frozen.seconds(tokens, link, slots=2, recomputes=recomputes)
    rule = bench_frozen.by_rule(stock, streamed[3].slot_bytes, link, 2)
    assert abs(streamed[0] / rule - 1) < 0.02


@pytest.mark.parametrize("recomputes", [False, True])
def test_the_least_capacity_falls_by_all_units_but_the_slots(recomputes: bool) -> None:
    resident, *streamed = (
        bench_frozen.least_capacity(slots=slots, recomputes=recomputes) for slots in (0, 2, 3)
    )
    for slots, least in zip((2, 3), streamed, strict=True):
        # One step of the search, and a segment.
        assert resident - least >= (12 - slots) * 96 * MIB - 34 * MIB
