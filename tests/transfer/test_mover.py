"""The mover: its promise in four sentences, and that every room that moves bytes rests on each.

The table takes one wait of the mover out at a time, and demands that each room that has it fails:
a race, or other bytes.
"""

import contextlib
import tempfile
from collections.abc import Callable

import pytest
import torch
from torch import nn

import residency
from residency import sim
from residency._transfer import Flight, Gate, HostRing, Mover, lanes_of

pytestmark = pytest.mark.sim
COUNT = 1 << 16


def on_host(*values: float) -> list[torch.Tensor]:
    return [torch.full((COUNT,), each, pin_memory=True) for each in values]


# ------------------------------------------------------------------------------- the four sentences


def test_what_a_move_reads_is_final_when_the_stream_of_its_producer_has_come_to_the_call(device):
    [target], mover = on_host(0.0), Mover(device)
    source = torch.full((COUNT,), 1.0, device=device).mul_(2.0)
    mover.follow_to_host()
    mover.to_host([(target, source)], [source]).wait()
    assert torch.equal(target, torch.full((COUNT,), 2.0))


def test_what_is_computed_on_the_lane_comes_after_the_moves(device):
    first, last = on_host(0.0, 0.0)
    source, mover = torch.full((COUNT,), 1.0, device=device), Mover(device)
    mover.follow_to_host()
    flight = mover.to_host([(first, source)], [source], then=lambda: (last, source * 3.0))
    mover.before_write([source])
    source.fill_(9.0)
    flight.wait()
    assert (first[-1].item(), last[-1].item()) == (1.0, 3.0)


def test_what_a_move_writes_on_the_device_is_unread_by_work_and_by_earlier_moves(device):
    mover, (first, second, home) = Mover(device), on_host(1.0, 2.0, 0.0)
    torch.full((COUNT,), 5.0, device=device).sum()  # its memory is the slot's, and still read
    slot = torch.empty(COUNT, device=device)
    mover.follow_to_device()
    mover.land(mover.to_device([(slot, first)]))
    mover.follow_to_host()
    home_flight = mover.to_host([(home, slot)], [slot])
    mover.to_device([(slot, second)], over=[slot]).wait()
    home_flight.wait()
    assert (home[-1].item(), slot[-1].item()) == (1.0, 2.0)


@pytest.mark.parametrize("is_freed", [False, True])
def test_what_a_move_reads_is_kept_until_it_was_read(device, is_freed: bool):
    mover, [target] = Mover(device), on_host(0.0)
    source = torch.full((COUNT,), 1.0, device=device)
    mover.follow_to_host()
    flight = mover.to_host([(target, source)], [source])
    if is_freed:
        mover.let_go([source])
        del source
        torch.full((COUNT,), 9.0, device=device)  # in its memory
    else:
        mover.before_write([source])
        source.fill_(9.0)
    flight.wait()
    assert target[-1].item() == 1.0


def test_nothing_is_left_behind_by_an_error_between_a_move_and_its_event(device, monkeypatch):
    mover, (target, source) = Mover(device), on_host(0.0, 1.0)
    there, read = torch.empty(COUNT, device=device), torch.full((COUNT,), 2.0, device=device)

    def interrupt(*_: object, **__: object) -> Flight:
        raise KeyboardInterrupt

    mover.follow_to_device()
    mover.follow_to_host()
    with monkeypatch.context() as patch:
        patch.setattr(Flight, "__init__", interrupt)
        with pytest.raises(KeyboardInterrupt):
            mover.to_device([(there, source)])
        with pytest.raises(KeyboardInterrupt):
            mover.to_host([(target, read)], [read])
    mover.settle()
    assert all(lane.query() for lane in (lanes_of(device).h2d, lanes_of(device).d2h))
    assert (target[-1].item(), there[-1].item()) == (2.0, 1.0)


# ------------------------------------------------------------------------ who rests on each of them


def _a_step(device: torch.device) -> bool:
    weights = [nn.Parameter(torch.full((COUNT,), 1.0, device=device)) for _ in range(4)]
    optimizer = torch.optim.SGD(weights, lr=0.5, momentum=0.5)
    residency.offload_optimizer(optimizer, bucket=4 * COUNT)
    for _ in range(3):
        for each in weights:
            each.grad = torch.ones_like(each)
        optimizer.step()
        torch.full((3 * COUNT,), 7.0, device=device).sum()  # where the slots were
    return all(bool((each == 1.0 - 0.5 * 4.25).all()) for each in weights)


def _an_offload_of_a_state(device: torch.device) -> bool:
    weight = nn.Parameter(torch.full((COUNT,), 1.0, device=device))
    optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.5)
    weight.grad = torch.full_like(weight, 3.0)
    optimizer.step()
    residency.offload_optimizer(optimizer)
    torch.full((COUNT,), 7.0, device=device)  # where the state was
    return bool((optimizer.state[weight]["momentum_buffer"] == 3.0).all())


def _an_onload(device: torch.device) -> bool:
    weight = nn.Parameter(torch.full((COUNT,), 1.0, device=device))
    optimizer = residency.offload_optimizer(torch.optim.SGD([weight], lr=0.5, momentum=0.5))
    weight.grad = torch.full_like(weight, 3.0)
    optimizer.step()
    optimizer.state_dict()
    torch.full((COUNT,), 7.0, device=device).sum()  # its memory is the state's next, and read
    residency.onload_optimizer(optimizer)
    return bool((optimizer.state[weight]["momentum_buffer"] == 3.0).all())


def _a_snapshot(device: torch.device) -> bool:
    model = nn.BatchNorm1d(COUNT).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with torch.no_grad():
        for each in (model.weight, model.running_mean):
            each.fill_(1.0).mul_(2.0)
    kept = residency.snapshot({"model": model})
    model.running_mean.fill_(9.0)  # by no optimizer
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    model.weight.data = torch.empty(0, device=device)
    found = kept.wait().tree["model"]
    return all(bool((found[key] == 2.0).all()) for key in ("weight", "running_mean"))


def _a_return_from_parking(device: torch.device) -> bool:
    model = nn.Linear(COUNT, 1).to(device)
    expected = model.weight.detach().cpu()
    residency.park(model)
    torch.full((COUNT,), 7.0, device=device).sum()  # its memory is the weight's next, and read
    residency.unpark(model)
    return torch.equal(model.weight.detach().cpu(), expected)


def _an_evaluation(device: torch.device) -> bool:
    ring = HostRing(num_bytes=8192)
    carried = ring.carry([torch.full((COUNT,), 1.0, device=device).mul_(2.0)])
    carried.wait()
    return bool((carried.tensors[0] == 2.0).all())


def _a_restore(device: torch.device) -> bool:
    state = {"weight": torch.full((COUNT,), 3.0, device=device)}
    with tempfile.TemporaryDirectory() as folder, residency.Checkpointer(folder) as checkpointer:
        checkpointer.save(0, state).wait()
        state["weight"].fill_(7.0)  # not yet done when the restore writes there
        checkpointer.restore(state)
        return bool((state["weight"] == 3.0).all())


ROOMS = {
    "step": _a_step,
    "offload": _an_offload_of_a_state,
    "onload": _an_onload,
    "snapshot": _a_snapshot,
    "parking": _a_return_from_parking,
    "evaluation": _an_evaluation,
    "restore": _a_restore,
}


def _without_over(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Mover.to_device

    def over_nothing(self: Mover, moves: object, *, over: object = (), timed: bool = False):
        return real(self, moves, timed=timed)

    monkeypatch.setattr(Mover, "to_device", over_nothing)


def _without(name: str, value: object = None) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(Mover, name, lambda *_, **__: value)


def _unknown_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gate, "reading", lambda self, *_: None)


WAITS = {
    "final": (_without("follow_to_host"), ["step", "offload", "snapshot", "evaluation"]),
    "unread by work": (_without("follow_to_device"), ["step", "onload", "parking", "restore"]),
    "unread by moves": (_without_over, ["step"]),
    "landed": (_without("land"), ["step", "snapshot"]),
    "kept": (_unknown_reads, ["step", "offload", "snapshot"]),
    "kept until freed": (_without("let_go"), ["step", "offload"]),
}


@pytest.mark.parametrize("room", ROOMS)
def test_with_all_waits_each_room_has_its_bits(device, room: str) -> None:
    assert ROOMS[room](device)


@pytest.mark.parametrize(
    ("remove", "room"),
    [
        pytest.param(remove, room, id=f"{name}-{room}")
        for name, (remove, rooms) in WAITS.items()
        for room in rooms
    ],
)
def test_each_room_rests_on_each_wait_that_it_has(
    device, monkeypatch: pytest.MonkeyPatch, remove: Callable[[pytest.MonkeyPatch], None], room: str
) -> None:
    with monkeypatch.context() as patch:
        remove(patch)
        try:
            is_right = ROOMS[room](device)
            torch.accelerator.synchronize()
        except sim.RaceError:
            is_right = False
    assert not is_right
    with contextlib.suppress(sim.RaceError):  # what the broken room left
        torch.accelerator.synchronize()
