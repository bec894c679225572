"""Notes on out-of-memory errors, for the tests of what they say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import residency

MIB = 1 << 20


def megabytes(number: int, device: torch.device) -> torch.Tensor:
    return torch.empty(number * MIB, dtype=torch.uint8, device=device)


def note_of(fill: Callable[[], Any], name: str) -> str:
    """Returns the note of the error in which a call ends, in a phase."""
    with pytest.raises(torch.OutOfMemoryError) as caught, residency.phase(name):
        fill()
    (note,) = caught.value.__notes__
    return str(note)
