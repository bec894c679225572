"""A block during which owners are on the host: training goes on as if there had been none."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import residency
from residency import InvalidArgumentError, RefusedError, park, parked, unpark

CAPACITY = 176 << 20
WIDTH = 2048  # the model has 16 MiB, its gradients as many, AdamW's state 32, a workspace 8
STATE_BYTES = 2 * 4 * WIDTH * WIDTH
ROOM_BYTES = 128 << 20  # more than is left beside the state


class Net(nn.Module):
    """Draws random numbers in training, and not in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(0.5)

    def forward(self, rows: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.body(rows)))


def step(model: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
    model(torch.randn(2, WIDTH, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train(device: torch.device, between: Callable[[nn.Module, Optimizer], None]) -> list[Tensor]:
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for _ in range(4):
        step(model, optimizer, device)
        between(model, optimizer)
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [tensor.detach().cpu() for tensor in (*model.parameters(), *states)]


def nothing(model: nn.Module, optimizer: Optimizer) -> None:
    pass


def preview(model: nn.Module, device: torch.device) -> Tensor:
    """Draws noise, as a sampler does, and takes more than the device has beside the state."""
    canvas = torch.ones(ROOM_BYTES, dtype=torch.uint8, device=device)
    with torch.no_grad():
        return model(torch.randn(2, WIDTH, device=device)).mean().cpu() + canvas[0].cpu()


@pytest.mark.sim_device(capacity=CAPACITY, schedule="late")
def test_training_with_previews_ends_at_the_bits_of_training_without(device: torch.device) -> None:
    expected = train(device, nothing)
    freed = []

    def between(model: nn.Module, optimizer: Optimizer) -> None:
        before = torch.accelerator.memory_allocated()
        with parked(optimizer, fork_rng=True) as num_bytes:
            freed.append(num_bytes)
            assert torch.accelerator.memory_allocated() == before - num_bytes
            torch.randn(3)
            torch.randn(1 << 20, device=device).sum().item()
        assert next(iter(optimizer.state.values()))["exp_avg"].device == device

    found = train(device, between)
    assert all(map(torch.equal, found, expected))
    assert freed == [STATE_BYTES] * 4


@pytest.mark.sim_device(capacity=CAPACITY, schedule="late")
def test_a_preview_has_room_that_it_has_not_beside_the_state(device: torch.device) -> None:
    def beside(model: nn.Module, optimizer: Optimizer) -> None:
        preview(model.eval(), device)

    def apart(model: nn.Module, optimizer: Optimizer) -> None:
        with parked(optimizer, fork_rng=True):
            preview(model.eval(), device)
        model.train()

    with pytest.raises(torch.OutOfMemoryError):
        train(device, beside)
    gc.collect()
    assert all(map(torch.equal, train(device, apart), train(device, nothing)))


@pytest.mark.sim_device(capacity=CAPACITY, schedule="late")
def test_all_comes_back_after_a_preview_that_ran_out_and_holds_the_room(
    device: torch.device,
) -> None:
    def fail(model: nn.Module, optimizer: Optimizer) -> None:
        def hopeless() -> None:
            kept = torch.ones(ROOM_BYTES, dtype=torch.uint8, device=device)
            torch.cat([kept, kept])

        with pytest.raises(torch.OutOfMemoryError), parked(optimizer, fork_rng=True):
            hopeless()
        assert next(iter(optimizer.state.values()))["exp_avg"].device == device

    assert all(map(torch.equal, train(device, fail), train(device, nothing)))


@pytest.mark.sim_device(capacity=CAPACITY, schedule="late")
def test_what_the_body_leaves_in_the_way_is_an_error_and_nothing_is_lost(
    device: torch.device,
) -> None:
    left: list[Tensor] = []

    def leave(model: nn.Module, optimizer: Optimizer) -> None:
        with pytest.raises(torch.OutOfMemoryError) as caught, parked(optimizer):
            left.append(torch.ones(ROOM_BYTES, dtype=torch.uint8, device=device))
        assert any("residency.unpark" in note for note in caught.value.__notes__)
        left.clear()
        assert unpark(optimizer) == STATE_BYTES

    assert all(map(torch.equal, train(device, leave), train(device, nothing)))


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_of_the_body_goes_on_and_all_is_back(
    device: torch.device, kind: type[BaseException]
) -> None:
    def fail(model: nn.Module, optimizer: Optimizer) -> None:
        def draw_and_raise() -> None:
            assert all(parameter.is_cpu for parameter in model.parameters())
            torch.randn(3, device=device)
            raise kind

        with pytest.raises(kind), parked(model, optimizer, fork_rng=True):
            draw_and_raise()
        assert next(model.parameters()).device == device

    assert all(map(torch.equal, train(device, fail), train(device, nothing)))


def test_without_fork_rng_the_random_numbers_go_on(device: torch.device) -> None:
    optimizer = AdamW(nn.Linear(2, 2).to(device).parameters())
    torch.manual_seed(0)
    with parked(optimizer):
        first = torch.randn(2), torch.randn(2, device=device).cpu()
    second = torch.randn(2), torch.randn(2, device=device).cpu()
    assert not any(map(torch.equal, first, second))


def test_an_owner_that_is_parked_or_on_the_host_stays_as_it_is(device: torch.device) -> None:
    away, host = nn.Linear(4, 4).to(device), nn.Linear(4, 4)
    park(away)
    with parked(away, host, SGD(host.parameters(), lr=0.1)) as num_bytes:
        assert num_bytes == 0
    assert away.weight.is_cpu
    assert unpark(away) > 0


@pytest.mark.sim_device(capacity=CAPACITY, schedule="late")
def test_a_note_on_what_ran_out_is_of_the_time_when_owners_were_away(device: torch.device) -> None:
    model = Net().to(device)
    optimizer = AdamW(model.parameters())
    step(model, optimizer, device)
    with (
        pytest.raises(torch.OutOfMemoryError) as caught,
        residency.phase("train"),
        parked(optimizer),
    ):
        torch.empty(CAPACITY, dtype=torch.uint8, device=device)
    [note] = caught.value.__notes__
    assert "parameters in 1" in note
    assert "optimizer states in" not in note
    assert "offload_optimizer" not in note  # which moves no more than the block has moved


def test_an_inner_block_leaves_what_the_outer_one_parked(device: torch.device) -> None:
    model = nn.Linear(4, 4).to(device)
    with parked(model):
        with parked(model) as num_bytes:
            assert num_bytes == 0
        assert model.weight.is_cpu
    assert model.weight.device == device


def test_the_second_owner_cannot_be_parked_and_the_first_is_back(device: torch.device) -> None:
    model = nn.Linear(4, 4).to(device)
    sparse = nn.Module()
    sparse.register_buffer("rows", torch.eye(3).to_sparse().to(device))
    with pytest.raises(RefusedError, match="only dense tensors"), parked(model, sparse):
        pytest.fail("the body ran")
    assert model.weight.device == device


def test_an_offloaded_optimizer_has_nothing_to_park(device: torch.device) -> None:
    model = Net().to(device)
    optimizer = AdamW(model.parameters())
    residency.offload_optimizer(optimizer, bucket="1MiB")
    step(model, optimizer, device)
    with parked(optimizer) as num_bytes:
        assert num_bytes == 0
    residency.onload_optimizer(optimizer)


def test_state_that_stays_on_the_device_between_steps_waits_on_the_host(
    device: torch.device,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128, bias=False), nn.Linear(128, 64, bias=False)).to(
        device
    )
    optimizer = AdamW(model.parameters())
    residency.offload_optimizer(optimizer, bucket="64KiB", resident="128KiB")
    model(torch.randn(2, 128, device=device)).sum().backward()
    optimizer.step()
    state = optimizer.state[model[0].weight]
    before = state["exp_avg"].cpu()
    with parked(optimizer) as num_bytes:
        assert num_bytes == 2 * 4 * 128 * 128
        assert state["exp_avg"].is_cpu
        with pytest.raises(RefusedError, match=r"residency\.unpark"):
            optimizer.step()
    assert state["exp_avg"].device == device
    assert torch.equal(state["exp_avg"].cpu(), before)
    optimizer.step()
    residency.onload_optimizer(optimizer)


def test_a_state_that_outgrows_its_place_while_it_is_parked_goes_home(device: torch.device) -> None:
    model = nn.Linear(64, 64, bias=False).to(device)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    residency.offload_optimizer(optimizer, bucket="64KiB", resident="16KiB")
    model(torch.randn(2, 64, device=device)).sum().backward()
    optimizer.step()
    state = optimizer.state[model.weight]
    momentum = state["momentum_buffer"].cpu()
    held = torch.accelerator.memory_allocated()
    with parked(optimizer) as num_bytes:
        assert num_bytes == 4 * 64 * 64
        state["second"] = torch.ones(64, 64, device=device)
    assert state["momentum_buffer"].is_cpu
    assert torch.equal(state["momentum_buffer"], momentum)
    assert torch.accelerator.memory_allocated() == held - 4 * 64 * 64


def test_a_block_gives_unused_memory_back_if_its_owners_have_none(device: torch.device) -> None:
    model = nn.Linear(4, 4)
    torch.ones(32 << 20, dtype=torch.uint8, device=device)
    assert torch.accelerator.memory_reserved() >= 32 << 20
    with parked(model) as num_bytes:
        assert num_bytes == 0
        assert torch.accelerator.memory_reserved() < 32 << 20
        torch.ones(32 << 20, dtype=torch.uint8, device=device)
    assert torch.accelerator.memory_reserved() < 32 << 20


def test_wrong_arguments_are_named_before_anything_moves(device: torch.device) -> None:
    model = nn.Linear(4, 4).to(device)
    with pytest.raises(InvalidArgumentError, match="parked got list"):
        parked(model, [model])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="gradients is 'keep'"):
        parked(model, gradients="keep")  # type: ignore[arg-type]
    assert model.weight.device == device
