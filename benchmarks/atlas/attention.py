"""Attention: grouped queries, masks, layouts, and each kernel by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.atlas.rows import DEVICE, DTYPES, Atlas, tensor, warm

# batch, query heads, key heads, query length, key length, head width
_SHAPES = (
    (4, 16, 16, 1024, 1024, 64),
    (4, 32, 8, 1024, 1024, 128),
    (2, 32, 4, 2048, 2048, 128),
    (2, 16, 8, 512, 512, 128),
    (1, 8, 8, 4096, 4096, 80),
    (4, 12, 12, 197, 197, 64),
    (2, 8, 4, 300, 300, 256),
    (3, 10, 2, 333, 333, 96),
    (2, 16, 16, 256, 1024, 64),
    (1, 14, 2, 3000, 3000, 64),
)
_LAYOUTS = ("bhld", "blhd")  # heads before the length, and behind it as a projection leaves them
_KERNELS = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")


def attention(atlas: Atlas) -> None:
    """Writes the rows of attention."""
    warm()
    for name in DTYPES:
        for shape in _SHAPES:
            for layout in _LAYOUTS:
                _of_shape(atlas, name, shape, layout)


def _of_shape(atlas: Atlas, dtype: str, shape: tuple[int, ...], layout: str) -> None:
    batch, heads, key_heads, length, key_length, width = shape
    behind = layout == "blhd"

    def made(num_heads: int, num: int) -> Tensor:
        sizes = (num, num_heads) if behind else (num_heads, num)
        return tensor(batch, *sizes, width, dtype=DTYPES[dtype])

    inputs = made(heads, length), made(key_heads, key_length), made(key_heads, key_length)
    masks = _masks(DTYPES[dtype], batch, heads, length, key_length)
    words = {"dtype": dtype, "shape": list(shape), "layout": layout}
    for mask, options in masks.items():
        if mask == "causal" and length != key_length:
            continue
        for grouped in [True, False] if heads != key_heads else [None]:
            run = _attend(inputs, behind, heads // key_heads, grouped, options)
            atlas.row("sdpa", run, inputs, **words, mask=mask, gqa=grouped)
    if not behind or dtype == "fp32":
        return
    for kernel in _KERNELS:
        for mask in ("none", "causal", "bool full"):
            if mask == "causal" and length != key_length:
                continue
            run = _with_kernel(kernel, inputs, heads // key_heads, masks[mask])
            atlas.row("sdpa", run, inputs, **words, mask=mask, gqa=False, backend=kernel)


def _masks(
    dtype: torch.dtype, batch: int, heads: int, length: int, key_length: int
) -> dict[str, dict[str, Any]]:
    padding = torch.ones(batch, 1, 1, key_length, dtype=torch.bool, device=DEVICE)
    padding[0, ..., -5:] = False
    expanded = padding.expand(batch, 1, length, key_length)
    zeros = torch.zeros(batch, 1, length, key_length, dtype=dtype, device=DEVICE)
    of_heads = torch.zeros(1, heads, length, key_length, dtype=dtype, device=DEVICE)
    return {
        "none": {},
        "causal": {"is_causal": True},
        "pad": {"attn_mask": padding},
        "pad expanded": {"attn_mask": expanded},
        "bool full": {"attn_mask": expanded.contiguous()},
        "float full": {"attn_mask": zeros},
        "float heads": {"attn_mask": of_heads},
        "dropout": {"dropout_p": 0.1},
    }


def _attend(
    inputs: tuple[Tensor, ...],
    behind: bool,
    num_repeats: int,
    grouped: bool | None,
    options: dict[str, Any],
) -> Callable[[], Tensor]:
    query, key, value = inputs

    def lain(part: Tensor) -> Tensor:
        return part.transpose(1, 2) if behind else part

    def run() -> Tensor:
        # The order in which the views are made is that of the backward pass.
        k, v = lain(key), lain(value)
        if grouped is False:
            k, v = k.repeat_interleave(num_repeats, 1), v.repeat_interleave(num_repeats, 1)
        more = {"enable_gqa": True} if grouped else {}
        return functional.scaled_dot_product_attention(lain(query), k, v, **options, **more)

    return run


def _with_kernel(
    kernel: str, inputs: tuple[Tensor, ...], num_repeats: int, options: dict[str, Any]
) -> Callable[[], Tensor]:
    query, key, value = inputs

    def run() -> Tensor:
        with sdpa_kernel([getattr(SDPBackend, kernel)]):
            k = key.transpose(1, 2).repeat_interleave(num_repeats, 1)
            v = value.transpose(1, 2).repeat_interleave(num_repeats, 1)
            q = query.transpose(1, 2)
            return functional.scaled_dot_product_attention(q, k, v, **options)

    return run
