"""A case empties its device before each run with a limit, or names the tensors that are left."""

from __future__ import annotations

import pytest
import torch

import residency
from residency._demo._bench import open_bench

pytestmark = pytest.mark.alone


def test_what_a_run_left_on_the_device_is_named_before_the_next_one(device: torch.device) -> None:
    with open_bench("sim", lambda *step: None) as bench:
        bench.limit(1 << 28)
        weights_of_before = torch.ones(1 << 20, device=bench.device)
        with pytest.raises(residency.RefusedError, match=r"4.00 MiB  .*weights_of_before"):
            bench.limit(1 << 28)
        del weights_of_before
        bench.limit(1 << 28)
