"""What tests of operations share: inputs that no device changes, and comparisons bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional


def random(device: str, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)
    return (
        torch.randint(0, 2 if dtype == torch.bool else 5, shape, generator=generator)
        .to(dtype)
        .to(device)
    )


def with_gradients(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[Any]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    output = function(*leaves)
    output.square().sum().backward()
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def flatten(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [tensor for part in result for tensor in flatten(part)]


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.device.type == "sim"
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.stride() == expected.stride()
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def attention(device: str, **options: Any) -> list[Any]:
    heads = 2 if options.get("enable_gqa") else 4
    shapes = ((2, 33, 4, 16), (2, 33, heads, 16), (2, 33, heads, 16))  # by position, as models do
    inputs = [random(device, *shape, seed=i).transpose(1, 2) for i, shape in enumerate(shapes)]
    return with_gradients(
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, **options), *inputs
    )
