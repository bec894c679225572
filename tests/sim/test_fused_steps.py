"""Fused steps over gradients in another order than their parameters, which CUDA refuses."""

from __future__ import annotations

import pytest
import torch

import residency

KINDS = {
    "adam": (torch.optim.Adam, {}, "params, grads, exp_avgs, and exp_avg_sqs must have same"),
    "adamw": (torch.optim.AdamW, {"amsgrad": True}, "exp_avg_sqs, and max_exp_avg_sqs must have"),
    "sgd": (torch.optim.SGD, {}, "Expected at::native::check_fast_path_restrictions"),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}, "params, grads, momentum_buffer_list"),
    "adagrad": (torch.optim.Adagrad, {}, "params, grads, and state_sums must have same dtype"),
}


def made(kind, device, *, is_offloaded=False):
    """Returns an optimizer over two parameters; the second's gradient lies in another order."""
    cls, settings, _ = KINDS[kind]
    parameters = [torch.nn.Parameter(torch.ones(3, 4, device=device)) for _ in range(2)]
    optimizer = cls(parameters, lr=0.5, fused=True, **settings)
    if is_offloaded:
        residency.offload_optimizer(optimizer, bucket=4096)
    for p in parameters:
        p.grad = torch.arange(12.0, device=device).view(3, 4)
    p.grad = p.grad.t().contiguous().t()
    return optimizer, parameters


@pytest.mark.parametrize("kind", KINDS)
def test_a_fused_step_refuses_gradients_of_other_strides_as_cuda_does(device, kind):
    optimizer, parameters = made(kind, device)
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    assert KINDS[kind][2] in str(caught.value)
    assert all(torch.equal(p.detach().cpu(), torch.ones(3, 4)) for p in parameters)


@pytest.mark.parametrize("kind", KINDS)
def test_an_offloaded_fused_step_refuses_them_before_any_bucket(device, kind):
    optimizer, parameters = made(kind, device, is_offloaded=True)
    with pytest.raises(residency.RefusedError, match=r"strides \(1, 3\).*Nothing was st"):
        optimizer.step()
    assert all(torch.equal(p.detach().cpu(), torch.ones(3, 4)) for p in parameters)
    optimizer.zero_grad()
    optimizer.step()


@pytest.mark.parametrize("is_offloaded", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fused_step_takes_gradients_that_lie_as_their_parameters(device, kind, is_offloaded):
    """Dimensions of one element may have any stride."""
    cls, settings, _ = KINDS[kind]
    ends = []
    for where in (torch.device("cpu"), device):
        turned = torch.ones(4, 3, device=where).t()
        narrow = torch.ones(5, 1, device=where)
        parameters = [torch.nn.Parameter(each) for each in (turned, narrow)]
        optimizer = cls(parameters, lr=0.5, fused=True, **settings)
        if is_offloaded and where == device:
            residency.offload_optimizer(optimizer)
        parameters[0].grad = torch.arange(12.0, device=where).view(4, 3).t()
        parameters[1].grad = torch.arange(5.0, device=where).as_strided((5, 1), (1, 7))
        optimizer.step()
        ends.append([p.detach().cpu() for p in parameters])
    assert all(map(torch.equal, *ends))
