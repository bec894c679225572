"""Who holds what of a training with the first FSDP, as torch 2.13's sources say: plain arithmetic.

Lines are those of ``torch/distributed/fsdp/_flat_param.py``. Sizes are those of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.torture.flat_cases import units_of

_WHOLE = 4  # bytes of float32
WORKSPACES = 2 * 8_519_680  # of cuBLAS, without a card's name, for each thread that computes


def block(num_bytes: int) -> int:
    """Returns what the allocator gives for so many bytes, up to 1 MiB."""
    return -(-num_bytes // 512) * 512


@dataclass(frozen=True)
class Unit:
    """A module with a flat parameter: the elements of its parameters, of which a rank has a share.

    Attributes:
        pieces: Where each parameter begins in the flat one, and how many elements it has.
        whole: Elements of the flat parameter.
        share: Elements that each rank keeps.
    """

    pieces: list[tuple[int, int]]
    whole: int
    share: int


def _unit(case: dict[str, Any], numels: list[int], num_ranks: int) -> Unit:
    # 2771-2777: addresses are multiples of 16 bytes, of the type in which it computes (644-760).
    aligned = 8 if case["precision"] in ("low", "low, whole sums") else 4
    at, pieces = 0, []
    for numel in numels:
        if case["orig"]:
            at = -(-at // aligned) * aligned
        pieces.append((at, numel))
        at += numel
    if case["orig"]:
        at = -(-at // num_ranks) * num_ranks
    share = at if case["strategy"] == "NO_SHARD" else -(-at // num_ranks)  # 1088-1140
    return Unit(pieces, at, share)


@dataclass(frozen=True)
class Held:
    """Bytes of each kind of owner, in a step of the optimizer.

    Attributes:
        parameters: Shares of all units.
        gradients: The same of their gradients.
        state: What AdamW keeps of them.
    """

    parameters: int
    gradients: int
    state: int


def held(case: dict[str, Any], num_ranks: int) -> Held:
    """Returns what the first rank keeps."""
    if case["offloads"]:  # 1256-1266: parameters and gradients are on the host, and so is the step
        return Held(0, 0, 0)
    units = [_unit(case, numels, num_ranks) for numels in units_of(case)]
    shares = sum(block(unit.share * _WHOLE) for unit in units)
    state = 0
    if case["optimizer"] == "AdamW" and case["orig"]:  # of each parameter what the share has of it
        for unit in units:
            ends = [(at, min(at + numel, unit.share)) for at, numel in unit.pieces]
            state += sum(2 * block((end - at) * _WHOLE) for at, end in ends if end > at)
    elif case["optimizer"] == "AdamW":
        state = 2 * shares
    return Held(shares, shares, state)


def passing(case: dict[str, Any], num_ranks: int) -> tuple[int, int]:
    """Returns the most bytes of passes without an owner: forward, and backward.

    Inputs and results of each operation, three of each block and two of a norm; in the backward
    pass as many gradients, and of one unit those that autograd makes a flat one of, one of them
    once more as a column, and the flat one, which is the unit's once all are copied into it.
    """
    width, longest = case["width"], max([*case["hidden"], case["width"]])
    one = block(_WHOLE * width) * 6 + block(_WHOLE * longest) * 3
    forward = (len(case["hidden"]) + 2) * one
    parts = 0
    for numels in units_of(case):
        unit = _unit(case, numels, num_ranks)
        of_parts = sum(block(numel * _WHOLE) for numel in [*numels, max(numels)])
        parts = max(parts, of_parts + block(unit.whole * _WHOLE))
    return forward, 2 * forward + parts
