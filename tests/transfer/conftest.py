"""What the transfer tests share."""

import gc

import pytest

from residency import _device


@pytest.fixture
def pinned_bytes(pinned_bytes):
    """Pinned bytes that are in use: what torch only keeps for reuse is given back first."""
    gc.collect()

    def in_use():
        _device.release_pinned_cache()
        return pinned_bytes()

    return in_use
