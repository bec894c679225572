"""Random numbers, mixed precision, attention, optimizers, modules and training on the device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parent))
from operations import attention, random

pytestmark = [pytest.mark.sim, pytest.mark.usefixtures("schedule")]  # both of them


# ----------------------------------------------------------------------------------- random numbers


def test_the_same_seed_gives_the_same_numbers() -> None:
    def draw() -> list[torch.Tensor]:
        noise = torch.randn(50, device="sim")
        return [
            noise,
            torch.rand_like(noise),
            torch.randperm(9, device="sim"),
            functional.dropout(noise),
        ]

    torch.manual_seed(3)
    first = draw()
    torch.manual_seed(3)
    again = draw()
    other = draw()
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0].cpu(), other[0].cpu())


def test_a_saved_state_brings_the_numbers_back() -> None:
    state = torch.sim.get_rng_state()
    first = torch.randn(50, device="sim").cpu()
    torch.randn(7, device="sim")
    torch.sim.set_rng_state(state)
    assert torch.equal(torch.randn(50, device="sim").cpu(), first)
    with torch.random.fork_rng(["sim:0"], device_type="sim"):
        torch.sim.manual_seed(11)
        torch.randn(50, device="sim")
    torch.sim.set_rng_state(state)
    assert torch.equal(torch.randn(50, device="sim").cpu(), first)


def test_a_generator_is_independent_of_the_default_one() -> None:
    generator = torch.Generator(device="sim").manual_seed(5)
    assert generator.initial_seed() == 5
    state = torch.sim.get_rng_state()
    first = torch.randn(20, device="sim", generator=generator).cpu()
    assert torch.equal(torch.sim.get_rng_state(), state)
    generator.manual_seed(5)
    assert torch.equal(torch.empty(20, device="sim").normal_(generator=generator).cpu(), first)
    cpu = torch.Generator().manual_seed(5)
    assert torch.equal(torch.randn(20, generator=cpu), first)


def test_dropout_draws_the_same_mask_when_a_checkpoint_recomputes_it() -> None:
    def run(use_checkpoint: bool) -> torch.Tensor:
        torch.manual_seed(1)
        weight = torch.ones(1000, device="sim", requires_grad=True)
        if use_checkpoint:
            output = checkpoint(lambda w: functional.dropout(w * 2.0), weight, use_reentrant=False)
        else:
            output = functional.dropout(weight * 2.0)
        output.square().sum().backward()
        assert weight.grad is not None
        return weight.grad.cpu()

    assert torch.equal(run(True), run(False))
    assert 0 < run(True).count_nonzero() < 1000


# ---------------------------------------------------------------------------------- mixed precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_picks_the_dtypes_that_it_picks_on_cuda(dtype: torch.dtype) -> None:
    x, w = random("sim", 8, 8), random("sim", 8, 8)
    with torch.autocast("sim", dtype=dtype):
        assert (x @ w).dtype == dtype
        assert functional.linear(x, w).dtype == dtype
        assert functional.scaled_dot_product_attention(*[x.view(1, 1, 8, 8)] * 3).dtype == dtype
        assert functional.conv1d(x[None], w[:, :, None]).dtype == dtype
        assert (x + w).dtype == torch.float32
        assert functional.softmax((x @ w), -1).dtype == torch.float32
        assert functional.layer_norm(x @ w, (8,)).dtype == torch.float32
        assert functional.cross_entropy(x @ w, torch.arange(8, device="sim")).dtype == torch.float32
        assert torch.cat([x @ w, x]).dtype == torch.float32
        assert (x @ w).sum().dtype == torch.float32
        assert (x @ w).norm().dtype == torch.float32
        with torch.autocast("sim", enabled=False):
            assert (x @ w).dtype == torch.float32
    assert (x @ w).dtype == torch.float32


def test_autocast_computes_what_casting_by_hand_computes() -> None:
    x, w = random("sim", 8, 8), random("sim", 8, 8).requires_grad_()
    with torch.autocast("sim", dtype=torch.bfloat16):
        loss = (x @ w).float().square().sum()
    loss.backward()
    by_hand = w.detach().bfloat16().requires_grad_()
    (x.bfloat16() @ by_hand).float().square().sum().backward()
    assert w.grad is not None
    assert by_hand.grad is not None
    assert w.grad.dtype == torch.float32
    assert torch.equal(w.grad.cpu(), by_hand.grad.float().cpu())


def test_a_gradient_scaler_skips_the_step_of_an_overflow() -> None:
    parameter = torch.nn.Parameter(torch.ones(10, device="sim"))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scaler = torch.amp.GradScaler("sim", init_scale=8.0, growth_interval=2)
    for factor, expected, scale in ((1.0, 0.5, 8.0), (float("inf"), 0.5, 4.0), (1.0, 0.0, 4.0)):
        optimizer.zero_grad()
        scaler.scale((parameter * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert parameter[0].item() == expected
        assert scaler.get_scale() == scale


# ---------------------------------------------------------------------------------------- attention


@pytest.mark.parametrize("is_causal", [True, False])
def test_grouped_attention_is_attention_with_repeated_heads(is_causal: bool) -> None:
    found = attention("sim", enable_gqa=True, is_causal=is_causal)
    expected = attention("cpu", enable_gqa=True, is_causal=is_causal)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_groups", [4, 2])
def test_attention_never_holds_a_square_of_the_sequence(num_groups: int) -> None:
    heads, length, width = 4, 2048, 16
    square_bytes = heads * length * length * 2
    q, k, v = (
        random("sim", 1, n, length, width).bfloat16().requires_grad_()
        for n in (heads, num_groups, num_groups)
    )
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    begin = torch.accelerator.memory_allocated()
    output = functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=num_groups != heads
    )
    output.sum().backward()
    added = torch.accelerator.max_memory_allocated() - begin
    assert output.nbytes <= added < square_bytes / 4


# --------------------------------------------------------------------------------------- optimizers

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
}


def _steps(name: str, device: str) -> list[torch.Tensor]:
    shapes = ((30, 40), (7,), (1,))
    parameters = [torch.nn.Parameter(random(device, *shape)) for shape in shapes]
    optimizer = OPTIMIZERS[name](parameters)
    for step in range(3):
        for parameter in parameters:
            parameter.grad = random(device, *parameter.shape, seed=step + 1)
        optimizer.step()
    states = [v for state in optimizer.state.values() for v in state.values() if v.dim() > 0]
    return [p.detach().cpu() for p in (*parameters, *states)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_steps_as_it_does_on_the_cpu(name: str) -> None:
    found, expected = _steps(name, "sim"), _steps(name, "cpu")
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_moving_a_module_keeps_its_parameters_and_the_optimizer_built_before() -> None:
    module = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    before, identities = module.weight.detach().clone(), [id(p) for p in module.parameters()]
    module.to("sim")
    assert [id(p) for p in module.parameters()] == identities
    assert module.weight.device.type == "sim"
    module(torch.ones(1, 4, device="sim")).sum().backward()
    optimizer.step()
    assert torch.equal(module.weight.detach().cpu(), before - 1.0)
    module.cpu()
    assert [id(p) for p in module.parameters()] == identities
    assert torch.equal(module.weight.detach(), before - 1.0)


def test_the_data_of_a_parameter_can_change_its_device() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.data = torch.full((5,), 2.0, device="sim")
    assert (parameter.device.type, parameter.shape) == ("sim", (5,))
    parameter.square().sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [4.0] * 5
    parameter.data = torch.zeros(2)
    assert parameter.device.type == "cpu"


def test_the_storage_of_a_tensor_can_be_emptied_and_filled_again() -> None:
    tensor = random("sim", 1000)
    expected, storage = tensor.cpu(), tensor.untyped_storage()
    before = torch.accelerator.memory_allocated()
    storage.resize_(0)
    assert before - torch.accelerator.memory_allocated() == 4096
    storage.resize_(4000)
    tensor.copy_(expected)
    assert torch.equal(tensor.cpu(), expected)


# ----------------------------------------------------------------------------------------- training


def _train(device: str, use_checkpoint: bool) -> list[float]:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,  # without groups the kernels are the same
        head_dim=8,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).to(device)
    if use_checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=False)
    losses = []
    tokens = torch.randint(0, 97, (2, 17), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        loss = model(input_ids=tokens.to(device), labels=tokens.to(device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_a_training_run_has_the_losses_that_it_has_on_the_cpu(use_checkpoint: bool) -> None:
    found = _train("sim", use_checkpoint)
    assert found == _train("cpu", use_checkpoint)
    assert found[-1] < found[0]
