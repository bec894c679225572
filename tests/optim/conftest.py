"""What the optimizer tests share: parameters whose shapes expose a missing wait, and runs to
compare."""

from types import SimpleNamespace

import pytest
import torch

import residency
from residency._optim._trial._copies import is_equal

SHAPES = ((64, 48), (33,), (), (128, 40), (7, 5, 3), (16, 16), (1000,))
MATRICES = ((64, 48), (33, 17), (7, 5), (128, 40), (16, 16))
BUCKET = 8000  # (128, 40) and (64, 48) are cut, the others share units


def make_parameters(device, *, dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(3)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype))
        for shape in shapes
    ]


def make_groups(parameters):
    return [
        {"params": parameters[:2]},
        {"params": parameters[2:4], "lr": 3e-3},
        {"params": parameters[4:]},
    ]


def set_gradients(parameters, step, *, missing=True):
    """Sets the gradients of a step; some are missing, another choice each step."""
    generator = torch.Generator().manual_seed(100 + step)
    for index, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        is_missing = missing and step > 0 and (step + index) % 5 == 0
        parameter.grad = None if is_missing else gradient.to(parameter.device)


def take_steps(optimizer, parameters, steps, *, missing=True):
    for step in steps:
        set_gradients(parameters, step, missing=missing)
        optimizer.step()
        # Reuse whatever the step freed: a copy that still reads it would carry this value home.
        torch.full((50_000,), 7.0, device=parameters[0].device)


def read(optimizer, parameters):
    """Returns copies of parameters, state and group values, with no wait for the device first."""
    state = [
        {
            key: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
            for key, value in dict(optimizer.state.get(p, {})).items()
        }
        for p in parameters
    ]
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return SimpleNamespace(
        parameters=[p.detach().cpu().clone() for p in parameters], state=state, groups=groups
    )


def assert_equal(left, right):
    for index, (a, b) in enumerate(zip(left.parameters, right.parameters, strict=True)):
        assert torch.equal(a, b), f"parameter {index} differs"
    for index, (a, b) in enumerate(zip(left.state, right.state, strict=True)):
        assert list(a) == list(b), f"state of parameter {index} has other keys, or another order"
        for key, value in a.items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == b[key].dtype, f"{key} of parameter {index} has another dtype"
                assert value.stride() == b[key].stride()
                assert torch.equal(value, b[key]), f"{key} of parameter {index} differs"
            else:
                assert is_equal(value, b[key]), f"{key} of parameter {index} differs"
    assert repr(left.groups) == repr(right.groups)


def align(num_bytes):
    return -(-num_bytes // 512) * 512


@pytest.fixture
def lab(device):
    """The helpers above, with the device filled in."""

    def parameters(**kwargs):
        return make_parameters(device, **kwargs)

    def adamw(*, offload=False, **kwargs):
        made = make_parameters(device)
        optimizer = torch.optim.AdamW(make_groups(made), lr=1e-2, **kwargs)
        if offload:
            residency.offload_optimizer(optimizer, bucket=BUCKET)
        return optimizer, made

    return SimpleNamespace(
        parameters=parameters,
        adamw=adamw,
        groups=make_groups,
        set_gradients=set_gradients,
        take_steps=take_steps,
        read=read,
        assert_equal=assert_equal,
        align=align,
        bucket=BUCKET,
        matrices=MATRICES,
        device=device,
    )
