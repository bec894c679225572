"""The search for what only reference cycles keep leaves nothing behind that keeps objects alive."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch

from residency._memory import _cycles
from residency._memory._cycles import bytes_in_cycles


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_bytes_are_those_of_each_storage_that_cycles_alone_have(device: torch.device) -> None:
    kept = torch.ones(100, device=device)
    tensors = (torch.ones(200, device=device), torch.ones(300, device=device), kept[:50])
    for tensor in tensors:
        cycle: list[Any] = [tensor, tensor.view(-1)]  # a storage of two tensors counts once
        cycle.append(cycle)
    del tensors, tensor, cycle
    assert bytes_in_cycles(device) == (200 + 300) * kept.itemsize


@pytest.mark.usefixtures("no_collector")
def test_a_search_that_a_debugger_looked_into_keeps_nothing_once_that_lets_go(
    device: torch.device,
) -> None:
    seen: list[dict[str, Any]] = []

    def look(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == "go":
            assert frame.f_back is not None
            seen.append(frame.f_back.f_locals)  # has the search itself

    held = [torch.ones(100, device=device)]  # not a local, which a profiler's frames keep
    before = sys.getprofile()
    sys.setprofile(look)
    try:
        assert bytes_in_cycles(device) == 0
    finally:
        sys.setprofile(before)
    assert seen
    reference = weakref.ref(held.pop())
    seen.clear()
    assert reference() is None


@pytest.mark.usefixtures("no_collector")
def test_the_error_that_ends_a_search_keeps_none_of_what_it_looked_at(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_cycles, "follow_torch", interrupt)
    tensor = torch.ones(100, device=device)
    with pytest.raises(KeyboardInterrupt) as caught:
        bytes_in_cycles(device)
    reference = weakref.ref(tensor)
    del tensor
    assert reference() is None, caught
