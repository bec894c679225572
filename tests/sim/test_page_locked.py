"""Page-locked memory: its pages are there at once, and what CUDA would find of it is found."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from residency import sim

pytestmark = pytest.mark.sim

MIB = 1 << 20


@pytest.fixture(autouse=True)
def empty_host() -> Iterator[None]:
    sim.enable("1GiB")
    torch.accelerator.empty_host_cache()
    assert sim.pinned_memory_stats()["pinned_bytes.current"] == 0
    yield
    torch.accelerator.synchronize()
    torch.accelerator.empty_host_cache()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("dry", [False, True])
def test_its_pages_are_there_at_once_and_never_in_dry_mode(dry: bool) -> None:
    sim.enable("1GiB", dry=dry)
    before = _resident_bytes()
    kept = torch.empty(16 * MIB, dtype=torch.uint8, pin_memory=True)
    more = _resident_bytes() - before
    assert (more < 4 * MIB) if dry else (more > 12 * MIB)
    del kept
    torch.accelerator.empty_host_cache()
    assert _resident_bytes() - before < 4 * MIB


def _over(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """Returns a tensor with a storage of its own over bytes of another, which it does not keep."""
    size = tensor.nbytes - offset
    buffer = (ctypes.c_char * size).from_address(tensor.data_ptr() + offset)
    return torch.frombuffer(buffer, dtype=tensor.dtype)


@pytest.mark.parametrize("kind", ["view", "over the first byte", "over an address inside"])
def test_a_copy_keeps_the_block_whose_context_or_first_byte_it_names(kind: str) -> None:
    target = torch.zeros(512, device="sim")
    torch.accelerator.synchronize()
    block = torch.full((1024,), 3.0, pin_memory=True)
    if kind == "view":
        source = block[512:]
    else:
        source = _over(block, 2048 * (kind == "over an address inside"))[:512]
    assert source.is_pinned()
    lane = torch.Stream(device="sim")
    with lane:
        target.copy_(source, non_blocking=True)
    address = block.data_ptr()
    del block, source
    other = torch.full((1024,), 4.0, pin_memory=True)
    is_kept = kind != "over an address inside"
    assert (other.data_ptr() != address) == is_kept
    lane.synchronize()
    assert target.tolist() == [3.0 if is_kept else 4.0] * 512
