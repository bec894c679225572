"""An interrupt, or a failed allocation, at any line: the owner is whole, here or there.

Afterwards everything comes back with the same bits, nothing stays page-locked or on the device,
and the next round trip works as if nothing had been.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from interruptions import count_lines, interrupted_at, spread
from torch import Tensor, nn

import residency
from residency import _private_pools, park, unpark
from residency._handoff import _hand_off_job
from residency._park import _guards
from residency._park._park import is_parked
from residency._park._parking import _arenas

pytestmark = [
    pytest.mark.sim,
    pytest.mark.sim_device(capacity="64MiB", schedule="late", workspaces=False),
]
ERRORS = [KeyboardInterrupt, torch.OutOfMemoryError]
# How many lines a test interrupts: few in the first tier, each at random of an equal part of them.
LINES = [16, pytest.param(80, marks=pytest.mark.whole)]


class Model(nn.Module):
    """A tie, views of one storage, a hook, a buffer, a gradient, and a parameter with a node."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        flat = torch.arange(64.0, device=device)
        self.left, self.right = nn.Parameter(flat[:16]), nn.Parameter(flat[16:])
        self.tied = self.left
        self.alone = nn.Parameter(torch.arange(8.0, device=device))
        self.register_buffer("mean", torch.ones(3, device=device))
        self.calls: list[str] = []
        self.left.register_hook(lambda g: self.calls.append("hook"))
        for parameter in self.parameters():
            parameter.grad = torch.full_like(parameter, 2.0)
        self.node = torch.autograd.graph.get_gradient_edge(self.left).node

    def tensors(self) -> list[Tensor]:
        pairs = [(p, p.grad) for p in self.parameters()]
        return [t for pair in pairs for t in pair if t is not None] + list(self.buffers())


def facts(model: Model) -> list[object]:
    ids = [id(t) for t in model.tensors()]
    values = [(t.detach().cpu().tolist(), t.requires_grad, t._version) for t in model.tensors()]
    storages = [t.untyped_storage()._cdata for t in model.tensors()]
    ties = [storages.index(cdata) for cdata in storages]
    return [
        ids,
        values,
        ties,
        torch.autograd.graph.get_gradient_edge(model.left).node is model.node,
    ]


def held() -> int:
    gc.collect()  # an error's frames may be a cycle
    torch.accelerator.synchronize()
    return torch.accelerator.memory_allocated()


def require_whole(model: Model) -> None:
    """Requires that all of it is in one place, and that what is parked can be brought back."""
    places = {t.is_cpu for t in model.tensors()}
    assert len(places) == 1
    assert places == {False} or is_parked(model)


@pytest.fixture
def model(device: torch.device, pinned_bytes: Callable[[], int]) -> Any:
    before = pinned_bytes()
    models = [Model(device)]
    yield models[0]
    models[0].node = None
    for arena in _arenas.get(models[0], {}).values():
        arena.free_all()
    assert len(_guards._standing) == 0
    assert pinned_bytes() == before  # no range of it was lost


@pytest.mark.parametrize("most", LINES)
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("gradients", ["move", "drop"])
def test_a_parking_that_is_interrupted_anywhere_is_whole(
    model: Model, error: type[BaseException], gradients: Any, most: int
) -> None:
    before, bytes_before = facts(model), held()

    def act() -> None:
        park(model, gradients=gradients)

    def check(where: str) -> None:
        require_whole_of(model, gradients)
        unpark(model)
        assert not is_parked(model)
        if gradients == "drop":
            for parameter in model.parameters():
                parameter.grad = kept[id(parameter)]
        assert facts(model) == before, where
        assert held() == bytes_before, where

    kept = {id(p): p.grad for p in model.parameters()} if gradients == "drop" else {}

    def require_whole_of(model: Model, gradients: str) -> None:
        require_whole(model)
        if gradients == "drop" and not is_parked(model):
            assert all(p.grad is kept[id(p)] for p in model.parameters())

    count = count_lines(act)
    unpark(model)
    for parameter in model.parameters():
        parameter.grad = kept.get(id(parameter), parameter.grad)
    for line in spread(count, most, seed=most):
        check(interrupted_at(line, act, error))


@pytest.mark.parametrize("most", LINES)
@pytest.mark.parametrize("error", ERRORS)
def test_a_return_that_is_interrupted_anywhere_is_whole(
    model: Model, error: type[BaseException], most: int
) -> None:
    before, bytes_before = facts(model), held()
    park(model)
    count = count_lines(lambda: unpark(model))
    for line in spread(count, most, seed=most):
        park(model)
        where = interrupted_at(line, lambda: unpark(model), error)
        require_whole(model)
        unpark(model)
        assert not is_parked(model)
        assert facts(model) == before, where
        assert held() == bytes_before, where


@pytest.fixture
def no_search_for_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out a look at every object of the process, which would be most of the lines."""
    monkeypatch.setattr(_private_pools, "may_have_graphs", lambda: False)


@pytest.mark.usefixtures("no_search_for_graphs")
@pytest.mark.parametrize("most", LINES)
@pytest.mark.parametrize("error", ERRORS)
def test_a_hand_off_that_is_interrupted_anywhere_is_whole(
    model: Model, error: type[BaseException], most: int
) -> None:
    before, bytes_before = facts(model), held()

    def act() -> None:
        with residency.hand_off("64MiB", park=[model], timeout=0.2, collect=False):
            pass

    for line in spread(count_lines(act), most, seed=most):
        try:
            where = interrupted_at(line, act, error)
        except residency.HandOffError as problem:  # on the way back
            where = str(problem)
            problem.retry()
        except residency.RefusedError as problem:  # the host has no room, as it seems
            where = str(problem)
        require_whole(model)
        unpark(model)
        assert facts(model) == before, where
        assert held() == bytes_before, where
        assert not _hand_off_job._active, where
    act()
    assert facts(model) == before


# A socket that an interrupt finds between two lines is closed as it is freed, which Python tells.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("no_search_for_graphs")
@pytest.mark.parametrize("is_taker", [True, False])
def test_the_other_side_of_an_interrupted_hand_off_ends_in_order(
    model: Model, device: torch.device, tmp_path: Path, is_taker: bool
) -> None:
    before, path = facts(model), tmp_path / "peer"
    settings: dict[str, Any] = {"timeout": 0.5, "peer": path, "device": device}

    def hand_over() -> None:
        with residency.hand_off("1MiB", park=[model], collect=False, **settings):
            pass

    def take() -> None:
        with residency.take_over("64MiB", **settings):
            pass

    act, other = (take, hand_over) if is_taker else (hand_over, take)

    def both(run: Callable[[], Any]) -> None:
        # On a busy machine a side may give the other up before it comes.
        ended = (KeyboardInterrupt, residency.HandOffError)
        with ThreadPoolExecutor(1) as thread, suppress(*ended):
            future = thread.submit(other)
            try:
                run()
            finally:
                with suppress(residency.HandOffError):
                    future.result(timeout=20)

    num_files = len(os.listdir("/proc/self/fd"))
    counted: list[int] = []
    while not counted:
        both(lambda: counted.append(count_lines(act)))
    for line in spread(counted[0], 12, seed=2):
        both(lambda line=line: interrupted_at(line, act, KeyboardInterrupt))
        unpark(model)
        assert facts(model) == before
        assert not _hand_off_job._active
        assert not path.exists()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= num_files + 2  # the first has made a pool or two
