"""Attention as models call it: every variant, with the CPU's bits where the CPU has the kernel,
and with no length x length matrix on the device where CUDA's fused kernels have none.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

pytestmark = pytest.mark.sim

LENGTH, WIDTH = 33, 16


def _inputs(
    device: torch.device | str,
    *,
    heads: int = 4,
    groups: int = 4,
    length: int = LENGTH,
    value_width: int = WIDTH,
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = ((heads, WIDTH), (groups, WIDTH), (groups, value_width))
    return [
        torch.randn(2, count, length, width, generator=generator)
        .to(dtype)
        .to(device)
        .requires_grad_()
        for count, width in shapes
    ]


def _attend(inputs: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """Returns the output and the gradients, on the host."""
    device = inputs[0].device
    mask = options.pop("attn_mask", None)
    if mask is not None:
        options["attn_mask"] = mask.to(device)
    torch.manual_seed(3)
    output = functional.scaled_dot_product_attention(*inputs, **options)
    weights = torch.linspace(-1, 1, output.numel()).view_as(output).to(output)
    gradients = torch.autograd.grad((output * weights).sum(), inputs)
    return [tensor.detach().cpu() for tensor in (output, *gradients)]


TRIANGLE = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
SLOPE = torch.linspace(-2, 2, LENGTH * LENGTH).view(1, 1, LENGTH, LENGTH)
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.5},
    "masked": {"attn_mask": TRIANGLE},
    "biased": {"attn_mask": SLOPE},
    "dropped": {"dropout_p": 0.3},
    "dropped, causal": {"dropout_p": 0.3, "is_causal": True},
    "dropped, scaled below zero": {"dropout_p": 0.3, "scale": -0.5},
    "dropped, masked": {"dropout_p": 0.3, "attn_mask": TRIANGLE},
    "dropped, biased": {"dropout_p": 0.3, "attn_mask": SLOPE},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_has_the_bits_that_the_cpu_gives(
    device: torch.device, name: str, dtype: torch.dtype
) -> None:
    options = VARIANTS[name]
    expected = _attend(_inputs("cpu", dtype=dtype), **options)
    found = _attend(_inputs(device, dtype=dtype), **options)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_values_of_another_width_have_the_bits_that_the_cpu_gives(device: torch.device) -> None:
    expected = _attend(_inputs("cpu", value_width=24), is_causal=True)
    found = _attend(_inputs(device, value_width=24), is_causal=True)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.3}], ids=str)
def test_grouped_heads_attend_as_repeated_ones(
    device: torch.device, options: dict[str, Any]
) -> None:
    # Not bit for bit: the CPU's grouped path is its plain formula, which adds up in another order.
    expected = _attend(_inputs("cpu", groups=2), enable_gqa=True, **options)
    found = _attend(_inputs(device, groups=2), enable_gqa=True, **options)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_bias_that_learns_has_the_gradient_that_the_cpu_gives(
    device: torch.device, dropout: float
) -> None:
    def learn(on: torch.device | str) -> list[torch.Tensor]:
        bias = SLOPE.to(on).requires_grad_()
        torch.manual_seed(3)
        output = functional.scaled_dot_product_attention(
            *_inputs(on), attn_mask=bias, dropout_p=dropout
        )
        weights = torch.linspace(-1, 1, output.numel()).view_as(output).to(on)
        (gradient,) = torch.autograd.grad((output * weights).sum(), bias)
        return [output.detach().cpu(), gradient.cpu()]

    for ours, theirs in zip(learn(device), learn("cpu"), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_dropout_draws_anew_and_again_from_the_same_seed(device: torch.device) -> None:
    inputs = _inputs(device)

    def draw() -> torch.Tensor:
        return functional.scaled_dot_product_attention(*inputs, dropout_p=0.5).detach().cpu()

    torch.manual_seed(1)
    first, second = draw(), draw()
    torch.manual_seed(1)
    assert torch.equal(draw(), first)
    assert not torch.equal(first, second)


# A row of the matrix is one number per key; what remains are the inputs, their gradients and sums.
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"enable_gqa": True},
        {"dropout_p": 0.1},
        {"dropout_p": 0.1, "is_causal": True, "enable_gqa": True},
    ],
    ids=str,
)
def test_no_square_of_the_length_is_charged_where_cuda_has_none(
    device: torch.device, options: dict[str, Any]
) -> None:
    heads, length = 4, 1024
    groups = 2 if options.get("enable_gqa") else heads
    inputs = _inputs(device, heads=heads, groups=groups, length=length, dtype=torch.bfloat16)
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    begin = torch.accelerator.memory_allocated()
    functional.scaled_dot_product_attention(*inputs, **options).sum().backward()
    added_bytes = torch.accelerator.max_memory_allocated() - begin
    square_bytes = 2 * heads * length * length * 2
    assert 0 < added_bytes < square_bytes // 3


def _added_bytes(inputs: list[torch.Tensor], **options: Any) -> int:
    torch.accelerator.reset_peak_memory_stats()
    begin = torch.accelerator.memory_allocated()
    functional.scaled_dot_product_attention(*inputs, **options)
    return torch.accelerator.max_memory_allocated() - begin


def test_the_program_chooses_the_kernel(device: torch.device) -> None:
    inputs = _inputs(device, length=512, dtype=torch.bfloat16)
    square_bytes = 2 * 4 * 512 * 512 * 4
    with sdpa_kernel(SDPBackend.MATH):
        assert _added_bytes(inputs) >= square_bytes
        plain = _attend(inputs)
    for name in ("CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "FLASH_ATTENTION"):
        with sdpa_kernel(SDPBackend.__members__[name]):
            assert _added_bytes(inputs) < square_bytes
            fused = _attend(inputs)
        for ours, theirs in zip(fused, plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    assert all(torch.equal(a, b) for a, b in zip(_attend(inputs), fused, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {"attn_mask": TRIANGLE},
        {"attn_mask": SLOPE.bfloat16()},
        {"attn_mask": SLOPE[..., :1, :].bfloat16()},
        {"attn_mask": TRIANGLE, "enable_gqa": True},
        {"is_causal": True, "enable_gqa": True},
    ],
    ids=["triangle", "slope", "row", "grouped triangle", "grouped causal"],
)
def test_the_kernel_of_cudnn_attends_as_the_plain_formula(
    device: torch.device, options: dict[str, Any]
) -> None:
    groups = 2 if "enable_gqa" in options else 4
    inputs = _inputs(device, groups=groups, dtype=torch.bfloat16)
    with sdpa_kernel(SDPBackend.MATH):
        plain = _attend(inputs, **options)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        fused = _attend(inputs, **options)
    for ours, theirs in zip(fused, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.filterwarnings("ignore:.*kernel:UserWarning")  # torch says why no kernel can be used
def test_a_kernel_that_cannot_do_it_is_refused_as_on_cuda(device: torch.device) -> None:
    inputs = _inputs(device)
    with (
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        pytest.raises(RuntimeError, match=r"No available kernel|No viable backend"),
    ):
        functional.scaled_dot_product_attention(*inputs, attn_mask=TRIANGLE.to(device))
