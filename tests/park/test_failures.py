"""Where a parking fails, everything is where it was; where a wait is left out, that shows."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

import residency
from residency import _device, _pinned, park, unpark
from residency._park._storages import Rebound
from residency._transfer import Flight, Lanes, Mover, _events, _slab as slab_module, lanes_of


def make(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)).to(device)
    model(torch.ones(4, 64, device=device)).sum().backward()
    return model


def state_of(model: nn.Module) -> list[tuple[object, ...]]:
    named = [*model.named_parameters(), *model.named_buffers()]
    gradients = [p.grad for p in model.parameters()]
    return [(n, id(t), t.device, t.detach().cpu().tolist()) for n, t in named] + [
        (id(g), g.device, g.cpu().tolist()) for g in gradients if g is not None
    ]


def held() -> int:
    gc.collect()
    return torch.accelerator.memory_allocated()


def no_host_room(monkeypatch: pytest.MonkeyPatch) -> type[BaseException]:
    monkeypatch.setattr(slab_module, "available_host_bytes", lambda: 4096)
    return residency.RefusedError


def no_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> type[BaseException]:
    def fail(num_bytes: int) -> torch.Tensor:
        raise RuntimeError("cudaHostAlloc failed")

    monkeypatch.setattr(_pinned, "allocate_pinned", fail)
    return residency.RefusedError


def failing_copy(monkeypatch: pytest.MonkeyPatch) -> type[BaseException]:
    real = Mover.to_host

    def copy_then_fail(self: Mover, *args: object, **kwargs: object) -> Flight:
        real(self, *args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(Mover, "to_host", copy_then_fail)
    return KeyboardInterrupt


def failing_binding(monkeypatch: pytest.MonkeyPatch, at: int = 3) -> type[BaseException]:
    real, calls = Rebound.to_host, []

    def fail_once(self: Rebound, storage: torch.UntypedStorage) -> None:
        calls.append(1)
        if len(calls) == at:
            raise KeyboardInterrupt
        real(self, storage)

    monkeypatch.setattr(Rebound, "to_host", fail_once)
    return KeyboardInterrupt


def failing_late_binding(monkeypatch: pytest.MonkeyPatch) -> type[BaseException]:
    return failing_binding(monkeypatch, at=9)


@pytest.mark.parametrize(("gradients", "node_lives"), [("move", True), ("drop", False)])
@pytest.mark.parametrize(
    "break_it",
    [no_host_room, no_pinned_memory, failing_copy, failing_binding, failing_late_binding],
)
def test_a_parking_that_fails_leaves_everything_whole_on_the_device(
    device,
    monkeypatch: pytest.MonkeyPatch,
    pinned_bytes: Callable[[], int],
    break_it: Callable[[pytest.MonkeyPatch], type[BaseException]],
    node_lives: bool,
    gradients: str,
) -> None:
    model = make(device)
    nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in model.parameters()]
    if not node_lives:
        nodes.clear()
    before, bytes_before, pinned_before = state_of(model), held(), pinned_bytes()
    with monkeypatch.context() as broken:
        error = break_it(broken)
        with pytest.raises(error):
            park(model, gradients=gradients)
    assert state_of(model) == before
    assert held() == bytes_before
    assert unpark(model) == 0
    freed = park(model, gradients=gradients)
    assert freed > 0
    assert unpark(model) <= freed
    del model, nodes
    gc.collect()
    assert pinned_bytes() == pinned_before


def test_a_parking_that_fails_ends_when_nothing_writes_into_its_host_memory_any_more(
    device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(device)
    torch.accelerator.synchronize()
    with monkeypatch.context() as broken, pytest.raises(failing_copy(broken)):
        park(model)
    assert lanes_of(device).d2h.query()  # else the memory, free again, would still be written


def test_a_device_without_room_leaves_everything_whole_on_the_host(
    device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(device)
    before = state_of(model)
    freed = park(model)
    parked, bytes_parked = state_of(model), held()
    real, calls = torch.empty, []

    def fail_from_the_fourth(*args: object, **kwargs: object) -> torch.Tensor:
        if kwargs.get("device") == device:
            calls.append(1)
            if len(calls) >= 4:
                raise torch.OutOfMemoryError("no room")
        return real(*args, **kwargs)

    with monkeypatch.context() as broken:
        broken.setattr(torch, "empty", fail_from_the_fourth)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            unpark(model)
    assert "call residency.unpark again" in caught.value.__notes__[0]
    del caught
    assert state_of(model) == parked
    assert held() == bytes_parked
    assert unpark(model) == freed
    assert state_of(model) == before


@pytest.mark.sim_device(capacity="64MiB", schedule="late")
def test_a_full_device_takes_the_module_back_once_there_is_room(sim_device) -> None:
    model = nn.ParameterList([torch.full((1 << 20,), float(n)) for n in range(8)]).to(sim_device)
    freed = park(model)
    torch.accelerator.empty_cache()
    other = torch.empty(48 << 20, dtype=torch.uint8, device=sim_device)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            unpark(model)
        assert all(p.is_cpu for p in model)
    del other
    assert unpark(model) == freed
    assert all(p.eq(n).all() for n, p in enumerate(model))


# ---------------------------------------------------------------------------------------- bad input


def test_a_module_on_the_host_has_nothing_to_park(device) -> None:
    with pytest.raises(residency.RefusedError, match="this Linear is on the host"):
        park(nn.Linear(2, 2))
    assert unpark(nn.Linear(2, 2)) == 0
    assert park(nn.Identity()) == 0


def test_what_is_neither_module_nor_optimizer_is_refused(device) -> None:
    for function in (park, unpark):
        with pytest.raises(residency.InvalidArgumentError, match="park got Tensor"):
            function(torch.ones(2, device=device))


@pytest.mark.parametrize("need", [-1, "5 apples", "1GB", 2.5, True])
def test_a_need_that_is_no_size_is_refused(device, need) -> None:
    model = make(device)
    with pytest.raises(residency.InvalidArgumentError, match="need is"):
        park(model, need=need)
    assert not any(p.is_cpu for p in model.parameters())


def test_an_unknown_fate_of_gradients_is_refused(device) -> None:
    with pytest.raises(residency.InvalidArgumentError, match="expected 'move' or 'drop'"):
        park(make(device), gradients="keep")


def test_tensors_that_have_no_movable_bytes_are_refused_by_name(device) -> None:
    for name, tensor in {
        "sparse": torch.eye(3).to_sparse(),
        "nothing": torch.empty(3, device="meta"),
    }.items():
        model = make(device)
        model.register_buffer(name, tensor)
        with pytest.raises(residency.RefusedError, match=rf"^{name} is .*Nothing moved"):
            park(model)
        assert not any(p.is_cpu for p in model.parameters())
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3)).to(device)
    with pytest.raises(residency.RefusedError, match="has no shape yet"):
        park(model)


def test_host_tensors_of_a_module_on_the_device_are_left_alone(device) -> None:
    model = make(device)
    model.register_buffer("positions", torch.arange(4))
    where = model.positions.data_ptr()
    park(model)
    unpark(model)
    assert model.positions.is_cpu
    assert model.positions.data_ptr() == where


def test_graphs_that_may_have_captured_the_parameters_are_warned_about(device) -> None:
    pool = torch.get_device_module().MemPool()
    model = make(device)
    with torch.get_device_module().use_mem_pool(pool):
        captured = torch.ones(4096, device=device)
    with pytest.warns(UserWarning, match="captured graph") as caught:
        park(model)
    assert [warning.filename for warning in caught] == [__file__]  # the line that parks
    unpark(model)
    del captured, pool


# -------------------------------------------------------------------------------------------- waits


class Unwaited(torch.Event):
    """An event that the host does not wait for."""

    def synchronize(self) -> None:
        pass


def no_wait_for_the_producers(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Lanes.mark
    monkeypatch.setattr(_device, "synchronize", lambda device=None: None)
    monkeypatch.setattr(Lanes, "mark", lambda self, stream, **_: real(self, self.d2h))


def no_wait_for_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        _events, "new_event", lambda device, **_: Unwaited(device.type, enable_timing=True)
    )


def no_wait_for_what_was_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Lanes.mark
    monkeypatch.setattr(Lanes, "mark", lambda self, stream, **_: real(self, self.h2d))


@pytest.mark.sim
@pytest.mark.parametrize(
    ("of_park", "of_unpark"),
    [
        (no_wait_for_the_producers, None),
        (no_wait_for_the_copies, None),
        (None, no_wait_for_the_copies),
        (None, no_wait_for_what_was_freed),
        (None, None),
    ],
)
def test_a_round_trip_without_one_of_its_waits_shows(
    device,
    monkeypatch: pytest.MonkeyPatch,
    of_park: Callable[[pytest.MonkeyPatch], None] | None,
    of_unpark: Callable[[pytest.MonkeyPatch], None] | None,
) -> None:
    from residency import sim

    model = nn.ParameterList([torch.full((4096,), float(n), device=device) for n in range(4)])
    with torch.no_grad():
        for parameter in model:
            parameter.add_(1)
    seen: list[float] = []
    try:
        with monkeypatch.context() as removed:
            if of_park is not None:
                of_park(removed)
            park(model)
            seen += [p.detach().clone()[0].item() for p in model]
        other = torch.full((4 * 4096,), 7.0, device=device)
        other.add_(1)
        del other
        with monkeypatch.context() as removed:
            if of_unpark is not None:
                of_unpark(removed)
            unpark(model)
            seen += [(p.detach() * 1)[0].item() for p in model]
        torch.accelerator.synchronize()
    except sim.RaceError:
        seen.clear()
    is_right = seen == [1.0, 2.0, 3.0, 4.0] * 2
    assert is_right is (of_park is None and of_unpark is None)


def test_a_part_of_what_is_parked_is_refused_with_the_owner_that_brings_it_back(device):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).to(device)
    freed = residency.park(model)
    with pytest.raises(
        residency.RefusedError, match=r"parked with a Sequential .*unpark with that"
    ):
        residency.park(model[0])
    assert residency.unpark(model[0]) == 0
    assert model[0].weight.is_cpu
    assert residency.unpark(model) == freed
    residency.park(model[0])
    residency.park(model)
    assert 0 < residency.unpark(model) < freed
    assert model[0].weight.is_cpu
    assert residency.unpark(model[0]) > 0
    assert model[0].weight.device == model[1].weight.device
    with pytest.raises(residency.RefusedError, match="which has nothing to free"):
        residency.park(model.cpu())
