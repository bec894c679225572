"""A use of frozen bytes that would not last as long as they do is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from frozen_lab import WIDTH, batch, net, passes
from torch import Tensor, nn

import residency
from residency import RefusedError


class Teller(nn.Module):
    """A block that returns more than its result."""

    def __init__(self, tell: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.mean = nn.Parameter(torch.zeros(WIDTH))
        self._tell = tell

    def forward(self, x: Tensor) -> Any:
        return self.layer(x - self.mean), self._tell(self, x)


class Tellers(nn.Module):
    """Blocks, whose second results are added to the last one."""

    def __init__(self, tell: Any) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Teller(tell) for _ in range(5)).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x, told = self.first(x), []
        for block in self.blocks:
            x, also = block(x)
            told.append(also)
        return x + sum(told)


def _write(block: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        block.mean.lerp_(x.mean((0, 1)), 0.5)
    return x


VIEWS = {
    "a row": lambda block, x: block.layer.weight[0],
    "another shape": lambda block, x: block.mean.unsqueeze(0),
    "without a history": lambda block, x: block.mean.detach(),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
@pytest.mark.parametrize("is_training", [True, False])
def test_a_block_that_returns_a_view_of_its_weights_is_refused(
    device: torch.device, view: Any, is_training: bool
) -> None:
    model = Tellers(view)
    residency.stream_frozen(model)
    with (
        torch.set_grad_enabled(is_training),
        pytest.raises(RefusedError, match=r"blocks\.0 returned a view .* clone\(\)"),
    ):
        model(batch(device))


def test_a_block_that_returns_a_copy_of_its_weights_has_the_bits_of_a_resident_one(
    device: torch.device,
) -> None:
    results = []
    for is_streamed in (False, True):
        torch.manual_seed(0)
        model = Tellers(lambda block, x: block.mean.clone() + block.layer.weight[0])
        residency.stream_frozen(model) if is_streamed else model.to(device)
        results.append(passes(model, device))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_write_within_a_forward_pass_is_refused_when_it_is_over_and_from_then_on(
    device: torch.device,
) -> None:
    model = Tellers(_write)
    stream = residency.stream_frozen(model)
    for _ in range(2):
        with pytest.raises(RefusedError, match=r"blocks\.0 was written within a pass.* a buffer"):
            model(batch(device))
    stream.stop()
    model.to(device)
    model(batch(device))


def test_a_write_within_a_backward_pass_is_refused_by_the_next_pass(device: torch.device) -> None:
    model = net()
    residency.stream_frozen(model)

    def write(gradient: Tensor) -> None:
        with torch.no_grad():
            model.blocks[3].scale.mul_(2)

    loss = model(batch(device)).square().mean()
    model.blocks[3].q.down.register_hook(write)
    loss.backward()
    with pytest.raises(RefusedError, match=r"blocks\.3 was written within a pass"):
        model(batch(device))


def test_a_cast_of_a_part_of_a_unit_is_refused_at_the_call(device: torch.device) -> None:
    model = net()
    residency.stream_frozen(model)
    with pytest.raises(RefusedError, match=r"to become torch\.bfloat16"):
        model.blocks[1].up.to(torch.bfloat16)
    assert model.blocks[1].up.weight.dtype == torch.float32
    model.blocks[1].up.to(device)  # stays at home
    assert model.blocks[1].up.weight.is_cpu
    passes(model, device)


def test_units_of_unequal_sizes_whose_slots_would_take_more_than_they_have_are_refused(
    device: torch.device,
) -> None:
    blocks = nn.ModuleList(nn.Linear(128, size) for size in (512, 64, 64, 64))
    model = nn.Sequential(nn.Linear(128, 128), blocks)
    blocks.requires_grad_(False)
    with pytest.raises(RefusedError, match=r"3 slots of the largest, 1\.0, .* nothing would be"):
        residency.stream_frozen(model, units=["1"], slots=3)
    assert all(p.is_cpu for p in model.parameters())


def test_a_stream_tells_what_it_is(device: torch.device) -> None:
    model = net()
    stream = residency.stream_frozen(model)
    assert "6 units" in repr(stream)
    assert "2 slots" in repr(stream)
    stream.stop()
    assert "stopped" in repr(stream)
