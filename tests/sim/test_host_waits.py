"""How often the host waits for the device: not once in a step, once in a parking and once in its
return, however many tensors there are.

On the simulated clock the host's time moves where it waits for work, and nowhere else, so each call
of C that moved it was a wait.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import pytest
import torch

import residency
from residency import sim

pytestmark = pytest.mark.sim

MANY = [512, pytest.param(2048, marks=pytest.mark.whole)]  # tensors


@pytest.fixture(autouse=True)
def clock() -> Iterator[None]:
    sim.enable("1GiB", schedule="late", clock=sim.Clock(memory_bytes_per_second="1GiB"))
    yield
    sim.enable("1GiB")


@contextmanager
def counted_waits() -> Iterator[list[str]]:
    """Gives the names of the C functions in which the host waited, each time that it did."""
    waits: list[str] = []
    begun: list[float] = []

    def look(frame: FrameType, event: str, function: Callable[..., object]) -> None:
        if event == "c_call":
            begun.append(sim.now_seconds())
        elif event in ("c_return", "c_exception") and begun and sim.now_seconds() > begun.pop():
            waits.append(function.__name__)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield waits
    finally:
        sys.setprofile(before)


def trained(
    count: int, make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
) -> tuple[torch.nn.ParameterList, torch.optim.Optimizer]:
    """Returns parameters of which each has a gradient, and their optimizer after two steps."""
    parameters = torch.nn.ParameterList(
        torch.nn.Parameter(torch.ones(16, device="sim")) for _ in range(count)
    )
    optimizer = make(list(parameters))
    residency.offload_optimizer(optimizer, bucket="16KiB")
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    optimizer.step()
    torch.accelerator.synchronize()
    return parameters, optimizer


def test_a_wait_is_counted() -> None:
    value = torch.ones(1 << 16, device="sim")
    with counted_waits() as waits:
        value.neg_()
        value.sum().item()
        torch.accelerator.synchronize()  # for which nothing is left
        value.neg_()
        torch.accelerator.synchronize()
    assert len(waits) == 2, waits


@pytest.mark.parametrize("count", MANY)
@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.AdamW(parameters, foreach=True),
        lambda parameters: torch.optim.AdamW(parameters, fused=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    ],
    ids=["AdamW", "fused AdamW", "SGD"],
)
def test_the_host_waits_for_nothing_in_a_step(
    count: int, make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
) -> None:
    _, optimizer = trained(count, make)
    with counted_waits() as waits:
        optimizer.step()
    assert waits == []
    torch.accelerator.synchronize()


@pytest.mark.parametrize("count", MANY)
def test_the_host_waits_once_in_a_parking_and_once_in_its_return(count: int) -> None:
    parameters, _ = trained(count, torch.optim.AdamW)
    residency.park(parameters)  # its slabs stay for the next one
    residency.unpark(parameters)
    torch.accelerator.synchronize()
    for call in (residency.park, residency.unpark):
        with counted_waits() as waits:
            call(parameters)
        assert len(waits) == 1, waits
