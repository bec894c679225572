"""What tests of the simulated accelerator share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import workers

sys.path.insert(0, str(Path(__file__).parent))
from allocator import start

from residency import sim

_IS_ALONE = os.environ.get("RESIDENCY_TEST_ONE_STREAM") == "1"


@pytest.fixture(scope="session")
def built() -> None:
    """Both libraries are there: what limits the time of a test's processes is not the compiler."""
    sim.enable("1GiB")
    script = "from residency import sim; sim.enable(device='cuda')"
    workers.finish(workers.start("-c", script, variables={"CUDA_VISIBLE_DEVICES": ""}))


@pytest.fixture
def default_settings_afterwards(quick_collections: None) -> Iterator[None]:
    """Gives the allocator back the settings that torch has; each start of it collects garbage."""
    yield
    start(8 << 30)


@pytest.fixture(params=["one-stream"] if _IS_ALONE else ["late", "overtake"])
def schedule(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device with work queued under both schedules and races checked; or, in a process that
    never makes a second stream, where kernels run at once.
    """
    if _IS_ALONE:
        sim.enable("2GiB")
    else:
        sim.enable("2GiB", schedule=request.param, check_races=True)
        torch.Stream(device="sim")  # from here on kernels are queued
    yield request.param
    torch.accelerator.synchronize()
