"""The bucket that an offload is offered with, and the classes whose states are cut to fit one."""

from __future__ import annotations

import torch

from residency._units import MIB, parse_bytes

_optim = torch.optim
ELEMENT_WISE = frozenset({
    _optim.SGD, _optim.Adam, _optim.AdamW, _optim.Adamax, _optim.NAdam, _optim.RAdam,
    _optim.Adadelta, _optim.Adagrad, _optim.RMSprop, _optim.Rprop, _optim.ASGD,
})  # fmt: skip
_LARGEST_BYTES = 128 * MIB  # the default bucket
_LEAST_BYTES = parse_bytes("1KiB")  # below, the allocator's rounding to 512 is what would count
_PART = 4  # slots take at most this part of the state, so that an offload saves most of it


def fitting_bucket(state_bytes: int, num_slots: int) -> int:
    """Returns the largest power of two of which all slots take a quarter of a state at most.

    It is no more than 128 MiB, and 0 where it would be less than 1 KiB.

    Args:
        state_bytes: What would be on the device without an offload.
        num_slots: The buckets that a step has there at once.
    """
    bucket_bytes = 1 << max(0, (state_bytes // (_PART * num_slots)).bit_length() - 1)
    return min(bucket_bytes, _LARGEST_BYTES) if bucket_bytes >= _LEAST_BYTES else 0
