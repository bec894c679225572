"""An overlapped step: the bits of one that is not, and of a resident one, whatever comes between;
and the device's bytes stay under the bound.
"""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from overlapped import BETWEEN, BUCKET, CLASSES, Run, ahead_of, check_same, evaluate
from torch import nn

import residency
from residency import _device, sim
from residency._optim import _unit_step
from residency._optim._overlap import Ahead, _blocks
from residency._transfer import Gate, Mover

pytestmark = pytest.mark.sim


@pytest.mark.parametrize("name", CLASSES)
def test_an_overlapped_run_has_the_bits_of_a_resident_one(device, name):
    resident, run = (Run(device, how, CLASSES[name]) for how in ("resident", "overlap"))
    for _ in range(6):
        resident.step()
        run.step()
    figures = run.optimizer.statistics()
    assert figures.ahead_bytes > 0
    assert figures.room_bytes >= figures.ahead_bytes
    assert figures.step_to_device_bytes < figures.home_bytes
    assert figures.hidden_bytes > 0
    assert figures.exposed_bytes >= figures.step_to_device_bytes + figures.step_to_host_bytes
    check_same(run, resident)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("master_weights", [False, True])
def test_bfloat16_checkpointing_and_masters_keep_the_bits(device, use_reentrant, master_weights):
    streamed, run = (
        Run(
            device,
            how,
            dtype=torch.bfloat16,
            master_weights=master_weights,
            use_reentrant=use_reentrant,
        )
        for how in ("stream", "overlap")
    )
    for index in range(7):
        for each in (streamed, run):
            each.step(num_batches=1 + index % 3, is_skipped=index == 4)
    assert run.ahead.figures.to_device_bytes > 0
    check_same(run, streamed)


# ------------------------------------------------------------------------ what comes between steps


@pytest.mark.parametrize("moment", ["after a step", "after a backward pass"])
@pytest.mark.parametrize("between", BETWEEN, ids=lambda each: each.__name__.strip("_"))
def test_anything_between_two_steps_keeps_the_bits(device, between, moment):
    stock, run = (Run(device, how) for how in ("resident", "overlap"))
    for each in (stock, run):
        for _ in range(4):
            each.step()
        if moment == "after a backward pass":
            each.accumulate()
        if each is run:
            assert run.ahead.held_bytes > 0
        between(each)
        for _ in range(2):
            each.step()
    check_same(run, stock)


def test_a_parking_gives_all_memory_of_the_state_back(device):
    run = Run(device, "overlap")
    for _ in range(4):
        run.step()
    assert run.ahead.held_bytes > 0
    residency.park(run.model)
    assert run.ahead.held_bytes == 0
    residency.unpark(run.model)


def test_a_parameter_that_is_frozen_with_its_gradient_is_stepped(device):
    values = []
    for overlap in (None, False, True):
        parameters = [nn.Parameter(torch.ones(40, device=device)) for _ in range(3)]
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        if overlap is not None:
            residency.offload_optimizer(optimizer, overlap=overlap)
        sum(each.square().sum() for each in parameters).backward()
        parameters[0].requires_grad_(requires_grad=False)
        optimizer.step()
        values.append(torch.stack([each.detach().cpu() for each in parameters]))
    assert torch.equal(values[0], values[1])
    assert torch.equal(values[0], values[2])


def test_an_onload_leaves_no_hook_and_no_memory_behind(device):
    run = Run(device, "overlap")
    before = _hooks(run)
    for _ in range(4):
        run.step()
    assert _hooks(run) > before
    residency.onload_optimizer(run.optimizer)
    gc.collect()
    assert _hooks(run) == before
    run.step()


def test_an_optimizer_that_dies_takes_its_guests_along(device):
    run = Run(device, "overlap")
    for _ in range(4):
        run.step()
    before = _device.memory_allocated(device)
    held = run.ahead.held_bytes
    hooks = _hooks(run)
    del run.optimizer
    gc.collect()
    torch.full((200_000,), 7.0, device=device)  # a copy that is under way would write here
    torch.accelerator.synchronize()
    assert 0 < held <= before - _device.memory_allocated(device)
    assert _hooks(run) < hooks


def _hooks(run: Run) -> int:
    of_gradients = sum(
        len(getattr(p, "_post_accumulate_grad_hooks", None) or ()) for p in run.model.parameters()
    )
    return of_gradients + sum(len(each._forward_pre_hooks) for each in run.model.modules())


# --------------------------------------------------------------------------------- errors and waits


@pytest.mark.parametrize("at", [1, 3, 9])
def test_a_step_that_fails_midway_keeps_what_it_stepped_and_goes_on_exactly(
    device, monkeypatch, at
):
    stock, run = (Run(device, how) for how in ("stream", "overlap"))
    for each in (stock, run):
        for _ in range(4):
            each.step()
        each.accumulate()
        shadow, calls = _unit_step.Shadow, []

        def fail(*args: Any, calls: list[int] = calls, shadow: Any = shadow) -> object:
            calls.append(1)
            if len(calls) == at:
                raise KeyboardInterrupt
            return shadow(*args)

        with monkeypatch.context() as patch:
            patch.setattr(_unit_step, "Shadow", fail)
            with pytest.raises(KeyboardInterrupt) as error:
                each.optimizer.step()
        for parameter in error.value.stepped_parameters:
            parameter.grad = None
        if not error.value.parameters_in_part:
            each.optimizer.step()
        each.optimizer.zero_grad()
        for _ in range(2):
            each.step()
    check_same(run, stock)


def test_an_error_in_a_hook_ends_the_overlap_and_not_the_run(device, monkeypatch, caplog):
    stock, run = (Run(device, how) for how in ("resident", "overlap"))
    for _ in range(4):
        stock.step()
        run.step()

    def fail(*_: object) -> None:
        raise RuntimeError("no list of blocks")

    with monkeypatch.context() as patch, caplog.at_level("WARNING", "residency"):
        patch.setattr(_blocks, "allocated_and_peak", fail)
        run.step()
        stock.step()
    assert [r.getMessage() for r in caplog.records] == [
        "an offloaded step goes on without overlap: RuntimeError: no list of blocks"
    ]
    assert run.ahead.held_bytes == 0
    for _ in range(2):
        stock.step()
        run.step()
    check_same(run, stock)


def _without(target: type, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(target, name, lambda *_, **__: None)


def _reads_unknown(patch: pytest.MonkeyPatch) -> None:
    real = Gate.reading
    patch.setattr(Gate, "reading", lambda self, tensors, *rest: real(self, [], *rest))


WAITS = {
    "the memory of a block": _without(Mover, "follow_to_device"),
    "the copies to the device": _without(Mover, "land"),
    "the step before the copies home": _without(Mover, "follow_to_host"),
    "the copies home before the next step or use": _reads_unknown,
    "the copies home before memory is given back": _without(Mover, "let_go"),
}


def _steps_and_wait(run: Run) -> None:
    for _ in range(3):
        run.step()
    torch.accelerator.synchronize()


@pytest.mark.parametrize("remove", WAITS.values(), ids=WAITS.keys())
def test_without_one_of_its_waits_an_overlapped_run_is_a_race(device, monkeypatch, remove):
    run = Run(device, "overlap", bucket=BUCKET // 3)
    for _ in range(4):
        run.step()
    with monkeypatch.context() as patch:
        remove(patch)
        with pytest.raises(sim.RaceError):
            _steps_and_wait(run)


# -------------------------------------------------------------------------------------- the bound


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Notes the most bytes until each reset: the schedule's own are the only ones."""
    found: list[int] = []
    reset = _device.reset_peak

    def note_and_reset(device: torch.device) -> None:
        found.append(_device.max_memory_allocated(device))
        reset(device)

    monkeypatch.setattr(_device, "reset_peak", note_and_reset)
    return found


@pytest.mark.parametrize(
    ("use_reentrant", "num_batches"),
    [
        (None, 1),
        pytest.param(None, 3, marks=pytest.mark.whole),
        pytest.param(False, 1, marks=pytest.mark.whole),
        pytest.param(False, 3, marks=pytest.mark.whole),
        pytest.param(True, 3, marks=pytest.mark.whole),
    ],
)
def test_a_run_is_never_above_its_own_peak_so_far_and_the_slots(
    device, peaks, use_reentrant, num_batches
):
    highest: dict[str, list[int]] = {}
    for how in ("resident", "overlap"):
        run = Run(device, how, use_reentrant=use_reentrant)
        state = 0 if how == "overlap" else 12 * sum(p.numel() for p in run.model.parameters())
        highest[how] = []
        torch.accelerator.synchronize()
        before = _device.memory_allocated(device)
        _device.reset_peak(device)
        for index in range(9):
            del peaks[:]
            run.step(num_batches=num_batches)
            if index % 4 == 3:
                evaluate(run)
            peaks.append(_device.max_memory_allocated(device))
            base = state if index else 0
            highest[how].append(max([*peaks, *highest[how]]) - before - base)
        del run
        gc.collect()
    slots = 2 * BUCKET
    for own, with_state in zip(highest["resident"], highest["overlap"], strict=True):
        assert with_state <= own + slots + 64 * 1024  # scalars of the state, and roundings


def _fused_steps(device: torch.device) -> None:
    """Trains until pieces of each parameter are here, and takes a step for which the first ones
    have gone; the last one, which takes the fused step's counter home, is here still.
    """
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)) for _ in range(3))
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    residency.offload_optimizer(optimizer, bucket="128KiB", slots=1, overlap=True)
    ahead = ahead_of(optimizer)
    for length in [800, 800, 800, 800, 32, 32]:
        batch = torch.randn(length, 128).pin_memory().to(device, non_blocking=True)
        model(batch).square().mean().backward()
        if length == 32:
            for block in ahead._blocks:
                assert any(guest.unit.pieces[0].is_last for guest in block.guests)
                block.guests = [each for each in block.guests if each.unit.pieces[0].is_last]
        optimizer.step()
        optimizer.zero_grad()
    torch.accelerator.synchronize()


def test_pieces_of_a_parameter_read_their_shared_scalar_behind_the_copy_to_it(device, monkeypatch):
    _fused_steps(device)
    monkeypatch.setattr(Ahead, "_follow_copies_home", lambda self, mover: None)
    with pytest.raises(sim.RaceError):
        _fused_steps(device)


def test_on_the_host_overlap_changes_nothing():
    model = nn.Linear(4, 4)
    optimizer = residency.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, overlap=True)
    for _ in range(4):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.statistics().ahead_bytes == 0
