"""A run whose frozen parameters stream has the bits of a resident one, forward and backward."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from frozen_lab import (
    WIDTH,
    Block,
    Net,
    assert_alike,
    batch,
    freeze,
    net,
    passes,
    quantized,
    trained,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import residency


@pytest.fixture(autouse=True)
def deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _in_order(*indices: int) -> Callable[..., list[Tensor]]:
    def step(model: Any, device: torch.device, count: int = 3) -> list[Tensor]:
        def forward(x: Tensor) -> Tensor:
            return model.head(functools.reduce(lambda h, i: model.blocks[i](h), indices, x))

        return passes(model, device, forward=forward, count=count)

    return step


def _branches(model: Any, device: torch.device) -> list[Tensor]:
    def forward(x: Tensor) -> Tensor:
        left = model.blocks[1](model.blocks[0](x))
        return model.head(left * model.blocks[3](model.blocks[2](x)) + model.blocks[4](x))

    return passes(model, device, forward=forward)


def _other_orders(model: Any, device: torch.device) -> list[Tensor]:
    orders = [random.sample(range(6), 6 - n % 3) for n in range(5)]
    return [t for order in orders for t in _in_order(*order)(model, device, count=1)]


def _retain(model: Any, device: torch.device) -> list[Tensor]:
    loss = model(batch(device)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return [p.grad.clone() for p in trained(model)]


def _two_forwards(model: Any, device: torch.device) -> list[Tensor]:
    first, second = model(batch(device)), model(batch(device, rows=1))
    first.square().mean().backward()
    second.abs().mean().backward()
    return [p.grad.clone() for p in trained(model)]


def _accumulated(model: Any, device: torch.device) -> list[Tensor]:
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
    for number in range(6):
        (model(batch(device)).square().mean() / 3).backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return list(model.state_dict().values())


def _evaluated_between(model: Any, device: torch.device) -> list[Tensor]:
    found = []
    for context in (torch.no_grad, torch.inference_mode, torch.no_grad):
        found += passes(model, device, count=1)
        with context():
            found.append(model(batch(device)).clone().cpu())
    return found


def _on_cpu(model: Any, device: torch.device) -> list[Tensor]:
    with torch.autograd.graph.save_on_cpu():
        return passes(model, device)


def _autocast(model: Any, device: torch.device) -> list[Tensor]:
    def forward(x: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return model(x).float()

    return passes(model, device, forward=forward)


def _frozen_written(model: Any, device: torch.device) -> list[Tensor]:
    found = passes(model, device, count=1)
    with torch.no_grad():
        for parameter in model.blocks[2].parameters():
            if not parameter.requires_grad:
                parameter.mul_(1.5)
    found += passes(model, device, count=1)
    model.load_state_dict({key: 0.5 * value for key, value in model.state_dict().items()})
    found += passes(model, device, count=1)
    with torch.no_grad(), residency.mutating(model.blocks[0].k.weight):
        model.blocks[0].k.weight.add_(1)
    return found + passes(model, device, count=1)


def _state_kept(model: Any, device: torch.device) -> list[Tensor]:
    found = passes(model, device, count=1)
    kept = model.state_dict()
    found += [value.cpu().clone() for value in kept.values()]
    found += passes(model, device, count=1)
    return found + [value.cpu() for value in kept.values()]


def _errors_between(model: Any, device: torch.device) -> list[Tensor]:
    found = passes(model, device, count=1)
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 8, WIDTH - 1).to(device))

    def fail(*_: object) -> None:
        raise ValueError("in backward")

    for index in (0, 3, 5):
        handle = model.blocks[index].register_full_backward_pre_hook(fail)
        with pytest.raises(ValueError, match="in backward"):
            passes(model, device, count=1)
        handle.remove()
        if model.head.weight.device != model.blocks[index].k.weight.device:  # streamed
            # The end of a pass that failed is heard of, too.
            assert all(p.is_cpu for p in model.blocks.parameters() if not p.requires_grad)
    return found + passes(model, device)


STEPS: dict[str, Callable[..., list[Tensor]]] = {
    "plain": passes,
    "other orders each time": _other_orders,
    "a block twice in a row, and again later": _in_order(0, 0, 1, 2, 0, 3, 0),
    "two branches that meet": _branches,
    "one graph, two backward passes": _retain,
    "two forward passes, then two backward passes": _two_forwards,
    "accumulated": _accumulated,
    "evaluated between": _evaluated_between,
    "saved tensors on the host": _on_cpu,
    "autocast": _autocast,
    "frozen parameters written between": _frozen_written,
    "a state dict that is kept": _state_kept,
    "errors in both passes": _errors_between,
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_a_run_has_the_bits_of_a_resident_one(device: torch.device, step: Any) -> None:
    assert_alike(net, step, device)


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_it_has_them_with_activations_computed_anew_and_dropout(
    device: torch.device, use_reentrant: bool | None, slots: int
) -> None:
    make = functools.partial(net, dropout=0.2, use_reentrant=use_reentrant)
    assert_alike(make, passes, device, slots=slots)
    assert_alike(make, _autocast, device, slots=slots)


@pytest.mark.parametrize("use_reentrant", [None, False, True])
@pytest.mark.parametrize("how", ["plain", "saved", "hidden"])
def test_it_has_them_with_packed_weights_that_a_function_saves_or_keeps_as_an_attribute(
    device: torch.device, how: str, use_reentrant: bool | None
) -> None:
    make = functools.partial(quantized, how, use_reentrant=use_reentrant)
    assert_alike(make, passes, device)
    assert_alike(make, _in_order(0, 1, 2, 1, 3), device)


class _Nest(nn.Module):
    """A block that calls another module of the model between its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.after = Block(), Block()
        object.__setattr__(self, "inner", inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.inner(self.before(x)))


@pytest.mark.parametrize("how", ["saved", "hidden"])
def test_it_has_them_with_a_unit_within_another_ones_forward_pass(
    device: torch.device, how: str
) -> None:
    def make() -> Any:
        model = quantized(how, num_blocks=4)
        model.nest = _Nest(model.blocks[1])
        model.nest.before, model.nest.after = quantized(how, num_blocks=2).blocks
        return freeze(model)

    def step(model: Any, device: torch.device) -> list[Tensor]:
        def forward(x: Tensor) -> Tensor:
            return model.head(model.nest(model.blocks[2](model.nest(model.blocks[0](x)))))

        return passes(model, device, forward=forward)

    assert_alike(make, step, device, units=lambda model: [*model.blocks, model.nest])


def test_it_has_them_with_a_weight_that_two_layers_of_one_unit_have(device: torch.device) -> None:
    def make() -> Any:
        model = Net()
        model.blocks[2].o.weight = model.blocks[2].k.weight
        return freeze(model)

    assert_alike(make, passes, device)


def test_it_has_them_with_units_of_unequal_sizes_and_one_that_is_trained(
    device: torch.device,
) -> None:
    def make() -> Any:
        model = net(num_blocks=9, hidden=(40, 200, 8, 96, 333))
        model.blocks[3].requires_grad_(True)
        return model

    run = assert_alike(make, passes, device, slots=3)
    assert run.stream.units == [f"blocks.{i}" for i in range(9) if i != 3]


def test_it_has_them_with_outputs_in_containers(device: torch.device) -> None:
    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Any:
            return {"hidden": [self.inner(x)], "none": None}

    def make() -> Any:
        model = quantized("hidden")
        model.blocks = nn.ModuleList(Wrapped(block) for block in model.blocks)
        return freeze(model)

    def step(model: Any, device: torch.device) -> list[Tensor]:
        def forward(x: Tensor) -> Tensor:
            return functools.reduce(lambda h, block: block(h)["hidden"][0], model.blocks, x)

        return passes(model, device, forward=forward)

    assert_alike(make, step, device)


def test_blocks_below_the_first_trained_one_come_for_the_forward_pass_alone(
    device: torch.device,
) -> None:
    def make() -> Any:
        model = net(num_blocks=8)
        model.blocks[:5].requires_grad_(False)
        return model

    def step(model: Any, device: torch.device) -> list[Tensor]:
        found = []
        for _ in range(3):
            x = batch(device).detach()
            found += passes(model, device, forward=lambda _, x=x: model(x), count=1)
        return found

    figures = assert_alike(make, step, device).stream.statistics()
    assert figures.num_loads < 3 * (8 + 5)  # 3 blocks in backward, and neighbours


class _Experts(nn.Module):
    """A layer that sends each row to one of its experts, and some experts get none."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 6)
        self.experts = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x.mean(1)).argmax(-1)
        found = torch.zeros_like(x)
        for number in sorted(set(chosen.tolist())):
            rows = (chosen == number).nonzero().flatten()
            found = found.index_add(0, rows, self.experts[number](x[rows]))
        return x + found


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_it_has_them_with_experts_as_units(device: torch.device, use_reentrant: Any) -> None:
    def make() -> Any:
        return freeze(nn.ModuleList(_Experts() for _ in range(3)))

    def step(model: Any, device: torch.device) -> list[Tensor]:
        def forward(x: Tensor) -> Tensor:
            for layer in model:
                if use_reentrant is None:
                    x = layer(x)
                else:
                    x = checkpoint(layer, x, use_reentrant=use_reentrant)
            return x

        return passes(model, device, forward=forward, count=4)

    streamed = assert_alike(
        make, step, device, units=lambda model: [e for layer in model for e in layer.experts]
    )
    assert len(streamed.stream.units) == 18


def test_a_write_between_the_passes_is_the_error_that_torch_raises(device: torch.device) -> None:
    model = net()
    with residency.stream_frozen(model):
        loss = model(batch(device)).square().mean()
        with torch.no_grad():
            model.blocks[1].k.weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
