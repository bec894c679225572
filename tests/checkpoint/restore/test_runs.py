"""A restored run goes on at the bits of an undisturbed one."""

import pytest
import torch
from runs import Run, assert_equal

from residency._checkpoint import _rng


@pytest.mark.parametrize("saver", ["plain", "offloaded"])
@pytest.mark.parametrize("reader", ["plain", "eager", "offloaded"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_restored_run_ends_at_the_bits_of_an_undisturbed_one(
    device, save, restore, saver, reader, fused
):
    undisturbed = Run(device, fused=fused)
    undisturbed.train(range(5))
    first = Run(device, offload=saver == "offloaded", fused=fused)
    first.train(range(3))
    saved = save(first.state, rng=_rng.random_states())
    at_save = first.read()
    second = Run(device, offload=reader == "offloaded", seed=7, fused=fused)
    restore(second.state, saved, eager=reader == "eager", staging="64KiB")
    torch.full((50_000,), 7.0, device=device)  # reuses what the restore freed
    assert_equal(second.read(), at_save)
    second.train(range(3, 5))
    assert_equal(second.read(), undisturbed.read())


@pytest.mark.parametrize("offload", [False, True])
def test_a_run_that_has_stepped_goes_back_to_the_save(device, save, restore, offload):
    run = Run(device, offload=offload)
    run.train(range(2))
    saved = save(run.state, rng=_rng.random_states())
    before = run.read()
    run.train(range(2, 4))
    after = run.read()
    restore(run.state, saved, staging="64KiB")
    assert_equal(run.read(), before)
    run.train(range(2, 4))
    assert_equal(run.read(), after)
