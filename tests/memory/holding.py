"""Tensors of 1 MiB that tests let something hold, and the one holder that there is."""

from __future__ import annotations

from collections.abc import Callable

import torch

import residency
from residency.types import Holder

NUM_ELEMENTS = 1 << 18
MIB = 1 << 20
Make = Callable[[], torch.Tensor]


def only() -> Holder:
    """The one holder that there is."""
    (holder,) = residency.holders()
    return holder
