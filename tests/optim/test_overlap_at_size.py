"""An overlapped step at real sizes, on the simulated clock: it is never slower than one that is
not, and a run of random lengths needs no larger device for it.
"""

import gc
import random

import pytest
import torch
from benchmarks import bench_overlap

from residency import _device, sim
from residency._units import MIB

pytestmark = [pytest.mark.sim, pytest.mark.whole]


@pytest.fixture(autouse=True)
def _nothing_left(device):
    yield
    gc.collect()


@pytest.mark.parametrize("tokens", [512, *bench_overlap.TOKENS])
@pytest.mark.parametrize("name", bench_overlap.DTYPES)
def test_no_length_is_slower_than_without_overlap(name, tokens):
    dtype = bench_overlap.DTYPES[name]
    stock, streamed, overlapped = (
        bench_overlap.seconds(how, tokens, dtype) for how in ("resident", *bench_overlap.HOWS)
    )
    assert overlapped <= 1.005 * streamed
    if tokens >= 8192:
        assert overlapped - stock <= 0.5 * (streamed - stock)


@pytest.mark.parametrize("recomputes", [False, True])
def test_the_least_capacity_is_that_of_a_streamed_step(recomputes):
    low, high = (2500 * MIB, 5000 * MIB) if recomputes else (4500 * MIB, 7000 * MIB)
    streamed, overlapped = (
        bench_overlap.least_capacity(how, recomputes=recomputes, low=low, high=high)
        for how in bench_overlap.HOWS
    )
    assert overlapped[0] <= streamed[0] < high
    assert overlapped[1] > 0.5


@pytest.fixture
def _expandable(device):
    before = _device.allocator_settings()
    _device.set_allocator_settings("expandable_segments:True")
    yield
    _device.set_allocator_settings(before or "expandable_segments:False")


@pytest.mark.usefixtures("_expandable")
@pytest.mark.parametrize("how", ["resident", "auto"])
def test_state_that_stays_goes_when_a_run_of_random_lengths_grows(how):
    numbers = random.Random(0)
    lengths = [numbers.randint(512, 8192) for _ in range(200)]
    device = sim.enable(5760 * MIB, schedule="eager", dry=True, workspaces=False)
    torch.accelerator.empty_cache()
    settings = {"dtype": torch.float32, "recomputes": True}
    if how == "resident":
        with pytest.raises(torch.OutOfMemoryError):
            bench_overlap.train(how, device, lengths, **settings)
        return
    bench_overlap.train(how, device, lengths, **settings)
