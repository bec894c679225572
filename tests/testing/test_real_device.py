"""The markers on a real accelerator, whose allocator keeps the limit."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def _take(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


@pytest.mark.device_memory(limit="256MiB", growth="0B")
def test_the_limit_is_kept(tested_device: torch.device) -> None:
    held = _take(200 * MIB, tested_device)
    with pytest.raises(torch.OutOfMemoryError):
        _take(100 * MIB, tested_device)
    del held


def test_the_limit_ends_with_its_test(tested_device: torch.device) -> None:
    assert torch.accelerator.memory_allocated() == 0
    assert _take(300 * MIB, tested_device).nbytes == 300 * MIB
