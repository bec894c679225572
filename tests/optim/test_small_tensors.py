"""A step of many small tensors makes few calls for each of them, and computes the same bits."""

from __future__ import annotations

import sys

import pytest
import torch

import residency


def optimizer_over(device, count, kind, options):
    parameters = [torch.nn.Parameter(torch.ones(16, 16, device=device)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return kind(parameters, lr=1e-3, foreach=True, **options)


def num_calls(action):
    """Counts the calls of functions, those of Python and those of C, in an action."""
    calls = 0

    def note(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


def calls_for_each_tensor(device, kind, options, *, is_offloaded, counts=(40, 80)):
    """Returns how many calls one more parameter of a step brings."""
    found = []
    for count in counts:
        optimizer = optimizer_over(device, count, kind, options)
        if is_offloaded:
            residency.offload_optimizer(optimizer)
        for _ in range(2):  # the first makes the state, the second a plan
            optimizer.step()
        found.append(num_calls(optimizer.step))
    return (found[1] - found[0]) / (counts[1] - counts[0])


CASES = [
    (torch.optim.SGD, {"momentum": 0.9}, 17),
    (torch.optim.AdamW, {}, 25),
]


@pytest.mark.sim  # counts calls of Python, which are the same everywhere
@pytest.mark.parametrize(("kind", "options", "most"), CASES)
def test_a_step_makes_few_calls_for_each_parameter_beside_the_plain_steps(
    device, kind, options, most
):
    plain, offloaded = (
        calls_for_each_tensor(device, kind, options, is_offloaded=each) for each in (False, True)
    )
    assert offloaded - plain <= most


@pytest.mark.sim
@pytest.mark.parametrize("is_offloaded", [False, True])
def test_a_step_makes_the_same_calls_after_a_snapshot_and_few_more_while_one_is_kept(
    device, is_offloaded
):
    count = 60
    optimizer = optimizer_over(device, count, torch.optim.AdamW, {})
    if is_offloaded:
        residency.offload_optimizer(optimizer)
    for _ in range(2):
        optimizer.step()
    residency.snapshot(optimizer).wait()  # the first that is taken adds a hook
    for _ in range(2):
        optimizer.step()
    before = num_calls(optimizer.step)
    kept = residency.snapshot(optimizer)
    kept.wait()
    for _ in range(2):  # the first leaves the homes to the snapshot, the second makes a plan
        optimizer.step()
    assert num_calls(optimizer.step) - before < 10 * count * is_offloaded + count
    del kept
    optimizer.step()  # it takes note of the loans that ended
    assert abs(num_calls(optimizer.step) - before) < count  # events, of those that are free


def mixed_parameters(device):
    """Runs of parameters that are alike, between others: empty, without dimensions, with gaps."""
    shapes = [*[(16, 16)] * 6, (5,), *[(8, 2)] * 5, (), *[(0, 3)] * 4, *[()] * 5, (16, 16), (7, 3)]
    seeds = torch.Generator().manual_seed(1)
    made = [torch.randn(shape, generator=seeds).to(device) for shape in shapes]
    made += [torch.randn(6, 4, generator=seeds).to(device).t() for _ in range(4)]
    made += [torch.randn(9, generator=seeds).to(device, torch.bfloat16) for _ in range(4)]
    return [torch.nn.Parameter(each) for each in made]


def give_gradients(parameters, step):
    seeds = torch.Generator().manual_seed(step)
    for index, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=seeds).to(parameter)
        parameter.grad = None if (index + step) % 9 == 0 else gradient


@pytest.mark.parametrize("bucket_bytes", [1 << 20, 8192])
@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {}), (torch.optim.RMSprop, {})],
)
def test_many_parameters_alike_and_others_step_as_the_plain_ones(
    device, kind, options, bucket_bytes
):
    pairs = []
    for is_offloaded in (False, True):
        parameters = mixed_parameters(device)
        optimizer = kind(parameters, lr=1e-2, **options)
        if is_offloaded:
            residency.offload_optimizer(optimizer, bucket=bucket_bytes)
        pairs.append((parameters, optimizer))
    for step in range(6):
        for parameters, optimizer in pairs:
            give_gradients(parameters, step)
            optimizer.step()
    (plain, theirs), (offloaded, ours) = pairs
    for left, right in zip(plain, offloaded, strict=True):
        assert torch.equal(left, right)
        before, after = theirs.state[left], ours.state[right]
        assert list(before) == list(after)
        assert all(torch.equal(before[key].cpu(), after[key].cpu()) for key in before)
