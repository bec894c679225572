"""What a compiled ``flex_attention`` takes, as torch 2.13's sources say: plain arithmetic.

Lines are those of ``torch/_inductor/kernel/flex/flex_attention.py`` (``attention``) and of
``flex_decoding.py`` (``decoding``) beside it. The figures were held against the buffers in the code
that the compiler itself writes for such calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from tests.torture.flex_cases import bias_shape, learns

_NO_MASK = 4 * 4  # _create_empty_block_mask: four numbers of 4 bytes


@dataclass(frozen=True)
class Figures:
    """Bytes of a call: what stays, and at the peaks the least and the most."""

    held: int
    forward: tuple[int, int]
    backward: tuple[int, int]


def given(case: dict[str, Any]) -> int:
    """Returns the bytes of all gradients that are asked for."""
    one = _size(case["dtype"])
    kept = case["kept_batch"] * case["kept_heads"] * case["keys"] * one
    sizes = {
        "q": case["batch"] * case["heads"] * case["length"] * case["width"] * one,
        "k": kept * case["width"],
        "v": kept * case["value_width"],
    }
    shape = bias_shape(case)
    of_bias = 0
    if shape is not None and case["bias_learns"]:
        of_bias = prod(shape) * _size(case["bias_dtype"] or case["dtype"])
    return sum(sizes[each] for each in case["learns"]) + of_bias


def matrices(case: dict[str, Any]) -> tuple[int, int]:
    """Returns what a call that is not compiled takes at least, and its backward pass.

    Source: ``math_attention`` and ``sdpa_dense_backward`` of ``torch/_higher_order_ops``. Scores as
    they are and as they were changed are there while each row's sum is taken of a third matrix; in
    the backward pass there are these two, their softmax, its gradient, and that of the scores.
    """
    one = case["batch"] * case["heads"] * case["length"] * case["keys"] * 4
    return 3 * one, 5 * one if learns(case) else 0


def _size(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)


def splits(case: dict[str, Any], num_processors: int) -> int:
    """Returns into how many parts keys are split (decoding 124-136), or 0."""
    ratio = case["heads"] // case["kept_heads"]
    mask_heads = case["heads"] if case["mask"] == "for each" else 1
    fits = mask_heads == 1 or (ratio == 1 and mask_heads == case["heads"])  # 55-71
    is_short = case["length"] < 128  # 47-49
    is_power = ratio & (ratio - 1) == 0  # 72-77
    is_auto = case["options"].get("BACKEND", "AUTO") == "AUTO"  # attention 246
    returns_greatest = case["returns"] in ("greatest", "both")  # 81
    if not (fits and is_short and is_power and is_auto) or returns_greatest:
        return 0
    return max(num_processors // max(case["batch"] * case["kept_heads"], 1) * 2, 1)


def figures(case: dict[str, Any], num_processors: int) -> Figures:
    """Returns what a call and its backward pass take."""
    one = _size(case["dtype"])
    rows = case["batch"] * case["heads"] * case["length"] * 4  # of float32
    out = case["batch"] * case["heads"] * case["length"] * case["value_width"] * one
    no_mask = 0 if case["mask"] else _NO_MASK
    # What stays: the result; its rows' sums where there is a gradient, for it; what is returned.
    num_returned = {"": 0, "sums": 1, "greatest": 1, "both": 2}[case["returns"]]
    held = out + num_returned * rows
    if learns(case):
        held += rows + no_mask
    num_splits = splits(case, num_processors)
    if num_splits:
        # decoding 255-275: results and two numbers of each part, which are then put together.
        parts = num_splits * rows * (case["value_width"] + 2)
        least = max(parts, held)
        most = parts + held + 3 * rows + no_mask
    else:
        least = max(held, out + 2 * rows)  # 370-381: sums and greatest scores, always
        most = least + rows + no_mask
    return Figures(held, (least, most), _backward(case, out, rows))


def _backward(case: dict[str, Any], out: int, rows: int) -> tuple[int, int]:
    if not learns(case):
        return 0, 0
    one = _size(case["dtype"])
    keys = case["batch"] * case["kept_heads"] * case["keys"]
    of_query = case["batch"] * case["heads"] * case["length"] * case["width"] * one
    of_keys, of_values = keys * case["width"] * one, keys * case["value_width"] * one
    passed = out if case["gradient"] == "one" else 0  # AOTAutograd: laid out as the result
    # 894-914: the query's and the values', in any case; 1062: the kernel's result is the keys',
    # and no buffer is made for a result that no further step reads.
    made = of_query + of_values + (of_keys if "k" in case["learns"] else 0)
    shape = bias_shape(case)
    of_bias, cast = 0, 0
    if shape is not None and case["bias_learns"]:
        of_bias = prod(shape) * 4  # zeros_and_scatter_lowering: in float32
        size = _size(case["bias_dtype"] or case["dtype"])
        cast = prod(shape) * size if size != 4 else 0  # 1090-1097
    # 877-889: a number for each row, of the result and its gradient; gone when the kernel is.
    kernel = passed + rows + made + of_bias
    summed = 0
    if case["batch"] != case["kept_batch"]:  # 1078-1089: over the batch, for all that share keys
        summed = of_values // case["batch"] + (made - of_query - of_values) // case["batch"]
    # When the kernel is done its rows' numbers are free, as is each sum where it was cast.
    after = made + of_bias + cast + summed
    return kernel, max(kernel, after) + rows
