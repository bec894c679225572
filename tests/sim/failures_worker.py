"""Runs the cases of tests/sim/test_failed_work.py: what used to end the process, or to confuse it.

Two phases, two processes: ``alone``, which never makes a second stream, and ``beside`` one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward
from torch import nn
from worker_cases import Cases

from residency import sim

case = Cases()
PHASE = sys.argv[3] if len(sys.argv) > 3 else "alone"
DEVICE = "sim"


def schedules() -> Iterator[str]:
    for schedule in ("late", "overtake", "eager"):
        sim.enable("1GiB", schedule=schedule)
        yield schedule


def fail() -> torch.Tensor:
    """Issues work that fails, and returns what it would have made."""
    return torch.zeros(3, device=DEVICE)[torch.tensor([5], device=DEVICE)]


def calls() -> dict[str, Callable[[], Any]]:
    """Returns calls of every kind, none of which reads what failed."""
    a = torch.arange(64.0, device=DEVICE).reshape(8, 8)
    host = torch.empty(8, 8).pin_memory()
    event = torch.Event(device=DEVICE)
    return {
        "a kernel that makes its results": lambda: torch.unique(a).cpu(),
        "one that waits for its size": lambda: a.nonzero().cpu(),
        "a number": lambda: a.sum().item(),
        "a kernel that writes": lambda: torch.add(a, 1, out=torch.empty_like(a)).cpu(),
        "a list": lambda: torch._foreach_add([a, a], 1.0)[1].cpu(),
        "a copy to the host": lambda: a.cpu(),
        "a copy to pinned memory": lambda: (
            host.copy_(a, non_blocking=True),
            torch.accelerator.synchronize(),
            host.clone(),
        ),
        "a copy to the device": lambda: torch.ones(4).to(DEVICE).cpu(),
        "random numbers": lambda: torch.randn(4, device=DEVICE).isfinite().all().item(),
        "attention": lambda: nn.functional.scaled_dot_product_attention(
            a[None, None], a[None, None], a[None, None], dropout_p=0.0
        ).cpu(),
        "a resize": lambda: torch.mul(a, 2.0, out=torch.empty(0, device=DEVICE)).cpu(),
        "an event": lambda: (event.record(), event.synchronize()),
        "a stream": lambda: torch.accelerator.current_stream().synchronize(),
        "the device": torch.accelerator.synchronize,
    }


def settle(result: Any) -> list[Any]:
    parts = result if isinstance(result, tuple) else (result,)
    return [part.tolist() if isinstance(part, torch.Tensor) else part for part in parts]


@case
def after_failed_work_every_call_is_what_it_was() -> None:
    if PHASE == "beside":
        torch.Stream(device=DEVICE)
    for schedule in schedules():
        for name, call in calls().items():
            expected = settle(call())
            made = fail()
            surfaced = False
            try:
                found = settle(call())
                assert found == expected, (schedule, name)
            except IndexError:
                surfaced = True
            assert surfaced, f"{schedule}, {name}: it waited, and no failure came out"
            torch.accelerator.synchronize()  # one failure, once
            assert made.isnan().all().item()  # poison
            assert settle(call()) == expected, (schedule, name)


@case
def failed_work_beside_another_stream_leaves_that_one_alone() -> None:
    if PHASE == "alone":
        return
    for _ in schedules():
        side = torch.Stream(device=DEVICE)
        fail()
        with side:
            kept = torch.ones(1000, device=DEVICE).mul_(3.0)
        with pytest.raises(IndexError):
            torch.accelerator.synchronize()
        side.synchronize()
        assert kept.cpu().eq(3.0).all()


@case
def kernels_that_refuse_a_dtype_leave_no_broken_results() -> None:
    for _ in schedules():
        for _ in range(3):
            a = torch.eye(17, device=DEVICE).bfloat16()
            vectors = None
            try:
                vectors = torch.linalg.eigh(a)[1]
                torch.accelerator.synchronize()
            except NotImplementedError:
                pass
            if vectors is not None:
                torch.flip(vectors, dims=[1])
            torch.randn(33, 17).to(DEVICE)
            torch.accelerator.synchronize()


@case
def an_index_is_found_out_of_bounds_at_the_next_wait() -> None:
    for _ in schedules():
        weight = torch.zeros(3, 3, device=DEVICE)
        rows = torch.ones(1, 3, device=DEVICE)
        nine, seven = (torch.tensor([index], device=DEVICE) for index in (9, 7))
        nn.functional.embedding(nine, weight)
        weight.index_add_(0, seven, rows)
        for _ in range(2):
            with pytest.raises((IndexError, RuntimeError), match="out of"):
                torch.accelerator.synchronize()
        torch.accelerator.synchronize()


@case
def zeros_without_bytes_are_zeros() -> None:
    for _ in schedules():
        zeros = torch._efficientzerotensor(3, device=DEVICE)
        assert zeros._is_zerotensor()
        assert zeros.cpu().tolist() == [0.0, 0.0, 0.0]
        assert (zeros + torch.ones(3, device=DEVICE)).cpu().tolist() == [1.0, 1.0, 1.0]
        assert torch.ones(3, device=DEVICE).copy_(zeros).cpu().tolist() == [0.0, 0.0, 0.0]
        zeros.view(1, 3).record_stream(torch.accelerator.current_stream())


@case
def derivatives_that_are_zero_are_zero() -> None:
    for _ in schedules():
        x = torch.tensor([-2.0, 0.0, 3.0], device=DEVICE, requires_grad=True)
        torch.sgn(x).sum().backward()
        assert x.grad is not None
        assert x.grad.cpu().tolist() == [0.0, 0.0, 0.0]
        for function in (torch.abs, torch.norm, lambda t: nn.functional.normalize(t, dim=0)):
            (first,) = torch.autograd.grad(function(x + 1).sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), x)
            assert second.isfinite().all().item()


@case
def forward_derivatives_of_constants_are_zero() -> None:
    for _ in schedules():
        x = torch.tensor([-2.0, 1.0, 3.0], device=DEVICE)
        linear = nn.Linear(3, 2).to(DEVICE)
        found = torch.func.jvp(nn.Sequential(linear, nn.ReLU()), (x[None],), (x[None],))[1]
        host = nn.Linear(3, 2)
        host.load_state_dict(linear.state_dict())
        there = x.cpu()[None]
        assert torch.equal(
            found.cpu(), torch.func.jvp(nn.Sequential(host, nn.ReLU()), (there,), (there,))[1]
        )
        with forward.dual_level():
            dual = forward.make_dual(x, torch.ones(3, device=DEVICE))
            zeros = torch.zeros(3, device=DEVICE)
            tangent = forward.unpack_dual(torch.cat([dual, zeros])).tangent
            assert tangent is not None
            assert tangent.cpu().tolist() == [1.0] * 3 + [0.0] * 3


@case
def a_conjugate_that_needs_a_gradient_can_be_recorded_on_a_stream() -> None:
    for _ in schedules():
        for _ in range(30):
            x = torch.randn(4, 8, 5, device=DEVICE, requires_grad=True)
            y = torch.fft.ihfft(x)
            assert y.is_conj()
            y.record_stream(torch.accelerator.current_stream())
            (1j * y).imag.record_stream(torch.accelerator.current_stream())
        torch.accelerator.synchronize()


@case
def a_generator_of_the_host_is_refused() -> None:
    for _ in schedules():
        for shape in ((3,), (40, 40)):
            with pytest.raises(RuntimeError, match="device type for generator but found 'cpu'"):
                torch.randn(shape, generator=torch.Generator(), device=DEVICE)


if __name__ == "__main__":
    sim.enable("1GiB")
    case.run(Path(sys.argv[4]) / f"{PHASE}{sys.argv[1]}.json")
