"""Sums over the bytes of a tensor tell any one byte that changed, wherever the tensor lies."""

import pytest
import torch

from residency._checkpoint._capture._sums import _ROW, _sums_of


@pytest.mark.parametrize("offset", [0, 1, 8])
@pytest.mark.parametrize("size", [1, 7, 8, 9, 3 * 8 * _ROW + 13])
def test_a_byte_that_changes_is_seen_at_any_offset_and_size(device, offset, size):
    span = (torch.arange(offset + size) % 251).to(torch.uint8).to(device)[offset:]
    before = _sums_of(span)

    def is_same():
        return all(map(torch.equal, before, _sums_of(span)))

    assert is_same()
    for at in {0, size // 2, size - 1}:
        span[at] += 1
        assert not is_same()
        span[at] -= 1
    assert is_same()
