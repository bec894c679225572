"""Bitwise comparison of two runs: every parameter, every optimizer state, every loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def count_values(tree: object) -> int:
    """Returns how many values a comparison with this tree looks at."""
    return len(list(_leaves("", tree)))


def different_values(one: object, other: object) -> list[str]:
    """Returns the names of the values in which two trees differ; empty when identical."""
    left, right = dict(_leaves("", one)), dict(_leaves("", other))
    names = list(left) + [name for name in right if name not in left]
    return [
        name
        for name in names
        if name not in left or name not in right or not _is_same(left[name], right[name])
    ]


def _leaves(name: str, tree: object) -> Iterator[tuple[str, object]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(f"{name}.{key}" if name else str(key), value)
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from _leaves(f"{name}[{index}]", value)
    else:
        yield name, tree


def _is_same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        # repr tells 0.0 from -0.0, and a NaN equals itself.
        return type(one) is type(other) and repr(one) == repr(other)
    if not isinstance(other, torch.Tensor) or one.dtype != other.dtype or one.shape != other.shape:
        return False
    # As bytes: a NaN equals the same NaN, and -0.0 is not 0.0.
    return torch.equal(_as_bytes(one), _as_bytes(other))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
