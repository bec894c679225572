"""What a step of many small tensors does for each of them, counted, not timed."""

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
