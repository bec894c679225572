"""Fixtures of every test: the device under test, and what it holds.

The same tests run on the simulated accelerator (late and overtaking work, races checked, memory
poisoned) and, with ``RESIDENCY_TEST_DEVICE=cuda``, on a real one; with ``sim-as-cuda``, on the
simulated one in CUDA's place.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from residency.testing import simulated_device_type

pytest_plugins = ["residency.testing.plugin", "pytester"]  # the first also where not installed

_FACE = simulated_device_type()
_REAL = _FACE is None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what the device under test cannot run, with the reason."""
    for item in items:
        if _REAL and item.get_closest_marker("sim"):
            item.add_marker(pytest.mark.skip(reason="tests the simulated accelerator itself"))
        if _FACE == "cuda" and item.path.parent.name == "sim":
            item.add_marker(pytest.mark.skip(reason="tests the simulated accelerator as 'sim'"))
        if not _REAL and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs silicon: RESIDENCY_TEST_DEVICE=cuda"))


@pytest.fixture
def device(tested_device: torch.device) -> torch.device:
    """The accelerator under test, empty, once for every schedule that it has."""
    return tested_device


@pytest.fixture
def pinned_bytes(device: torch.device) -> Callable[[], int]:
    """Pinned host bytes that are in use: what torch only keeps for reuse is given back first."""
    from residency import _device, sim

    gc.collect()

    def in_use() -> int:
        _device.release_pinned_cache()
        if _REAL:
            return int(torch.cuda.host_memory_stats()["allocated_bytes.current"])
        return sim.pinned_memory_stats()["pinned_bytes.current"]

    return in_use


@pytest.fixture(scope="session")
def trace_files() -> list[Path]:
    """Recorded allocator traces: ``$RESIDENCY_TRACE_DIR``, else ``shared/data`` near the tree."""
    root = Path(__file__).resolve().parents[1]
    folders = [near / "shared" / "data" / "cuda_traces" for near in (root.parent, root)]
    if "RESIDENCY_TRACE_DIR" in os.environ:
        folders.insert(0, Path(os.environ["RESIDENCY_TRACE_DIR"]))
    files = next((found for f in folders if (found := sorted(f.glob("*.json.gz")))), [])
    if not files:
        looked = ", ".join(map(str, folders))
        pytest.skip(f"no recorded traces in {looked}; set RESIDENCY_TRACE_DIR")
    return files
