"""Compares what checkpoints hold."""

from __future__ import annotations

from typing import Any

import torch


def assert_same(found: Any, expected: Any, at: str = "") -> None:
    assert type(found) is type(expected), at
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, at
        assert torch.equal(found, expected), at
    elif isinstance(expected, dict):
        assert list(found) == list(expected), at
        for key in expected:
            assert_same(found[key], expected[key], f"{at}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), at
        for index, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_same(a, b, f"{at}.{index}")
    else:
        assert found == expected, at
