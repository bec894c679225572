"""How much torch's allocator asks the device for, to put a block there.

Source: c10/core/AllocatorConfig.h: kSmallSize, kSmallBuffer, kLargeBuffer, kMinLargeAlloc,
kRoundLarge.
"""

from __future__ import annotations

from residency._units import MIB

SMALL_BLOCK_BYTES = MIB  # and what is smaller lies in segments of its own
_OF_ONE_BLOCK = 10 * MIB
SMALL_SEGMENT_BYTES = 2 * MIB  # and the step in which those of one block grow
_LARGE_SEGMENT_BYTES = 20 * MIB


def segment_bytes(num_bytes: int) -> int:
    """Returns the size of the segment that is made for a block of so many bytes."""
    if num_bytes <= SMALL_BLOCK_BYTES:
        return SMALL_SEGMENT_BYTES
    if num_bytes < _OF_ONE_BLOCK:
        return _LARGE_SEGMENT_BYTES
    return -(-num_bytes // SMALL_SEGMENT_BYTES) * SMALL_SEGMENT_BYTES


def taken_by(num_bytes: int, count: int) -> int:
    """Returns the segments that so many blocks of a size take."""
    segment = segment_bytes(num_bytes)
    return -(-count // (segment // num_bytes)) * segment
