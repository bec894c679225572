"""Bytes go back by the cheapest means that suffice, and nothing is done that does not pay."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from limits import WORKER_SECONDS

from residency import InvalidArgumentError, RefusedError, _device, reclaim
from residency._handoff import _reclaim
from residency._memory._state import measure

MIB = 1 << 20


class Calls:
    """Counts what reclaim asks of torch and of the collector, and lets it through."""

    def __init__(self) -> None:
        self.made: list[str] = []


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    seen = Calls()

    def spied(owner: object, name: str, note: str) -> None:
        real = getattr(owner, name)

        def spy(*args: object, **kwargs: object) -> object:
            seen.made.append(note)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, spy)

    spied(_device, "empty_cache", "empty_cache")
    spied(_device, "clear_workspaces", "clear_workspaces")
    spied(gc, "collect", "collect")
    return seen


@pytest.fixture(autouse=True)
def no_collections_of_their_own() -> Iterator[None]:
    """Garbage waits until somebody collects it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def block(num_mib: int, device: torch.device) -> torch.Tensor:
    return torch.empty(num_mib * MIB, dtype=torch.uint8, device=device)


class Cycle:
    """Keeps a tensor and itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.itself = self


def test_nothing_is_done_where_the_bytes_are_free_already(
    device: torch.device, calls: Calls
) -> None:
    del_me = block(64, device)
    del del_me
    assert measure(device).returnable >= 64 * MIB
    freed = reclaim("16MiB")
    assert calls.made == []
    assert freed.total == 0
    assert freed.before is freed.after
    assert str(freed).startswith("reclaimed 0 B in ")


def test_nothing_is_done_where_nothing_would_come_back(device: torch.device, calls: Calls) -> None:
    kept = block(32, device)
    _device.empty_cache(device)
    calls.made.clear()
    freed = reclaim()
    assert freed.total == 0
    assert "empty_cache" not in calls.made
    assert "collect" not in calls.made
    del kept


def test_the_cache_goes_back_and_the_search_ends_there(device: torch.device, calls: Calls) -> None:
    kept = block(64, device)
    cycle = Cycle(block(64, device))
    del cycle
    cached = block(128, device)
    del cached
    need = measure(device).free + 64 * MIB
    freed = reclaim(need)
    assert freed.free >= need
    assert freed.cache == freed.total == freed.before.returnable >= 128 * MIB
    assert calls.made == ["empty_cache"]
    del kept


def test_blocks_that_drain_are_waited_for_and_reported_apart(device: torch.device) -> None:
    stream = torch.Stream(device=device)
    tensor = block(64, device)
    tensor.record_stream(stream)
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        tensor.fill_(1)
    del tensor
    state = measure(device)
    if not state.draining:
        pytest.skip("the stream had ended before the tensor was freed")
    freed = reclaim(state.free + 32 * MIB)
    assert freed.draining >= 64 * MIB
    assert freed.free >= state.free + 64 * MIB


def test_a_cycle_that_holds_tensors_is_collected_and_reported(
    device: torch.device, calls: Calls
) -> None:
    cycle = Cycle(block(64, device))
    del cycle
    freed = reclaim()
    assert freed.cycles >= 64 * MIB
    assert "collect" in calls.made


class Lingering:
    """Garbage with whose end a collection stays until it is let go."""

    def __init__(self) -> None:
        self.itself = self
        self.is_met, self.may_go = threading.Event(), threading.Event()

    def __del__(self) -> None:
        self.is_met.set()
        self.may_go.wait(WORKER_SECONDS)


@pytest.mark.parametrize("ends", [True, False])
def test_a_collection_that_another_thread_is_at_comes_first(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    lingering = Lingering()
    is_met, may_go = lingering.is_met, lingering.may_go
    del lingering
    other = threading.Thread(target=gc.collect)
    other.start()
    assert is_met.wait(WORKER_SECONDS)
    cycle = Cycle(block(64, device))
    del cycle
    collect = gc.collect

    def collect_then_let_go(generation: int) -> int:
        found = collect(generation)  # which does nothing the first time
        if ends:
            may_go.set()
            other.join(WORKER_SECONDS)
        return found

    monkeypatch.setattr(gc, "collect", collect_then_let_go)
    monkeypatch.setattr(_reclaim, "_COLLECTOR_SECONDS", WORKER_SECONDS if ends else 0.01)
    freed = reclaim()
    may_go.set()
    other.join(WORKER_SECONDS)
    assert (freed.cycles >= 64 * MIB) == ends
    assert ("another thread's garbage collection" in str(freed)) != ends
    collect()


def test_no_garbage_is_collected_where_cycles_hold_no_tensor_of_the_device(
    device: torch.device, calls: Calls
) -> None:
    host_only = Cycle(torch.empty(MIB))
    del host_only
    alive = Cycle(block(8, device))
    freed = reclaim()
    assert "collect" not in calls.made
    assert freed.cycles == 0
    assert alive.tensor.numel() == 8 * MIB


def test_collection_can_be_switched_off(device: torch.device, calls: Calls) -> None:
    cycle = Cycle(block(64, device))
    del cycle
    freed = reclaim(collect=False)
    assert freed.cycles == 0
    assert "collect" not in calls.made
    assert reclaim().cycles >= 64 * MIB


@pytest.mark.sim
def test_workspaces_go_back_when_they_are_needed(simulated_workspaces: torch.device) -> None:
    device = simulated_workspaces
    weight = torch.ones(64, 64, device=device)
    weight @ weight
    torch.accelerator.synchronize()
    freed = reclaim()
    assert freed.workspaces >= 8 * MIB
    assert reclaim().total == 0
    weight @ weight  # makes its workspace anew
    assert reclaim().workspaces >= 8 * MIB


@pytest.mark.sim
def test_workspaces_are_left_alone_while_private_pools_are_alive(
    simulated_workspaces: torch.device,
) -> None:
    device = simulated_workspaces
    module = torch.get_device_module(device)
    weight = torch.ones(64, 64, device=device)
    weight @ weight
    pool = module.MemPool()
    with module.use_mem_pool(pool):
        captured = block(4, device)
    freed = reclaim()
    assert freed.workspaces == 0
    assert any("workspaces were left" in note for note in freed.notes)
    assert captured.numel()
    del captured, pool
    assert reclaim().workspaces >= 8 * MIB


def test_what_is_reclaimed_is_what_the_allocator_gave_back(device: torch.device) -> None:
    keep = [block(3, device) for _ in range(8)]
    drop = [block(5, device) for _ in range(8)]
    del drop
    before = torch.accelerator.memory_reserved()
    freed = reclaim()
    assert freed.total == before - torch.accelerator.memory_reserved()
    assert sum(freed.by_means().values()) == freed.total
    assert freed.after.returnable == 0
    del keep


@pytest.mark.parametrize("need", [-1, "many", "12GB", 1.5, True])
def test_a_size_that_means_nothing_is_refused(device: torch.device, need: object) -> None:
    with pytest.raises(InvalidArgumentError, match="need is"):
        reclaim(need)  # type: ignore[arg-type]


def test_an_unknown_device_is_refused(device: torch.device) -> None:
    with pytest.raises(InvalidArgumentError, match="device is"):
        reclaim(device="cpu")
    with pytest.raises(InvalidArgumentError, match="this machine has"):
        reclaim(device=f"{device.type}:7")


def test_a_captured_stream_is_refused(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_device, "is_capturing", lambda device: True)
    with pytest.raises(RefusedError, match="being captured"):
        reclaim()


def test_every_used_device_is_waited_for_before_caches_are_emptied(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    real = torch.accelerator.empty_cache
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda index=0: (1, 0, 1)[index])
    monkeypatch.setattr(
        torch.accelerator, "synchronize", lambda index: order.append(f"wait {index}")
    )
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: (order.append("empty"), real()))
    _device.empty_cache(device)
    assert order == ["wait 0", "wait 2", "empty"]
