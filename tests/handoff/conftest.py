"""Fixtures of the tests of freeing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def simulated_workspaces(device: torch.device) -> Iterator[torch.device]:
    """The simulated accelerator, charging the matrix library's workspaces."""
    from residency import _device, sim

    yield sim.enable("1GiB", workspaces=True, device=device.type)
    _device.clear_workspaces(device)
