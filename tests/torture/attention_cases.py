"""Random calls of ``scaled_dot_product_attention``: as JSON, and as tensors of any device."""

from __future__ import annotations

import random
from typing import Any

import torch
from tests.torture.attention_oracle import CUDNN, EFFICIENT, FLASH, MATH, Call

_WIDTHS = [8, 16, 32, 40, 64, 72, 80, 96, 104, 128, 136, 160, 168, 192, 200, 224, 256, 264]
_ODD_WIDTHS = [1, 4, 12, 20, 33, 100]
_LENGTHS = [1, 2, 17, 64, 100, 128, 129, 200, 256, 300, 512, 1000, 1024]
_EVERY = (MATH, FLASH, EFFICIENT, CUDNN)


def draw(chance: random.Random) -> dict[str, Any]:
    """Draws one call."""
    length = chance.choice(_LENGTHS)
    keys = length if chance.random() < 0.6 else chance.choice([*_LENGTHS, 2048, 4096])
    heads = chance.choice([1, 2, 4, 6, 8, 12, 32])
    groups = chance.random() < 0.25
    kept = chance.choice([each for each in range(1, heads + 1) if heads % each == 0])
    width = chance.choice(_WIDTHS if chance.random() < 0.9 else _ODD_WIDTHS)
    batch = chance.choice([1, 2, 3, 8])
    shapes = [
        [length, keys],
        [batch, 1, length, keys],
        [batch, heads, length, keys],
        [batch, 1, 1, keys],
        [1, 1, length, keys],
        [1, length, keys],
    ]
    mask = chance.choice(shapes) if chance.random() < 0.35 else None
    is_bool = chance.random() < 0.5
    some = chance.sample(_EVERY, chance.randint(1, 3)) if chance.random() < 0.2 else _EVERY
    return {
        "dtype": chance.choice(["float16", "bfloat16", "bfloat16", "float32"]),
        "batch": batch,
        "heads": heads,
        "kept_heads": kept if groups else heads,
        "gqa": groups and (chance.random() < 0.9 or kept != heads),
        "length": length,
        "keys": keys,
        "width": width,
        "value_width": width if chance.random() < 0.9 else chance.choice(_WIDTHS),
        "layout": chance.choice(["by head", "by position", "packed", "by head", "by width"]),
        "grads": chance.choice(["qkv", "qkv", "qkv", "", "v"]),
        "mask": mask,
        "mask_is_bool": is_bool,
        "mask_learns": mask is not None and not is_bool and chance.random() < 0.2,
        "causal": mask is None and chance.random() < 0.4,
        "dropout": chance.choice([0.0, 0.0, 0.0, 0.1, 0.25]),
        "deterministic": chance.random() < 0.1,
        "kernels": sorted(some),
        "gradient": chance.choice(["by head", "by position", "one"]),
    }


def tensors_of(case: dict[str, Any], device: str) -> Call:
    """Makes the tensors of a case, laid out as it says; its gradient is another call."""
    dtype = getattr(torch, case["dtype"])
    sizes = [
        (case["heads"], case["length"], case["width"]),
        (case["kept_heads"], case["keys"], case["width"]),
        (case["kept_heads"], case["keys"], case["value_width"]),
    ]
    made = []
    for name, (heads, length, width) in zip("qkv", sizes, strict=True):
        shape = (case["batch"], heads, length, width)
        if case["layout"] == "packed":
            wide = (case["batch"], length, 3, heads, width)
            tensor = torch.empty(wide, dtype=dtype, device=device)[:, :, 1].transpose(1, 2)
        else:
            orders = {"by head": (0, 1, 2, 3), "by position": (0, 2, 1, 3)}
            order = orders.get(case["layout"], (0, 1, 3, 2))
            tensor = torch.empty_permuted(shape, order, dtype=dtype, device=device)
        made.append(tensor.detach().requires_grad_(name in case["grads"]))
    mask = None
    if case["mask"] is not None:
        mask = torch.zeros(
            case["mask"], dtype=torch.bool if case["mask_is_bool"] else dtype, device=device
        )
        mask.requires_grad_(case["mask_learns"])
    options = {each: case[each] for each in ("dropout", "causal", "gqa", "deterministic")}
    return Call(*made, mask, kernels=tuple(case["kernels"]), **options)


def gradient_of(case: dict[str, Any], out: torch.Tensor) -> torch.Tensor:
    """Makes the gradient that the output of a case gets."""
    if case["gradient"] == "one":
        return torch.ones((), dtype=out.dtype, device=out.device).expand(out.shape)
    order = (0, 2, 1, 3) if case["gradient"] == "by position" else (0, 1, 2, 3)
    return torch.empty_permuted(out.shape, order, dtype=out.dtype, device=out.device)
