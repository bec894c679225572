"""The bucket that an offload takes or is offered with; the classes that are cut to fit one."""

from __future__ import annotations

import torch

from residency._units import MIB, parse_bytes

_optim = torch.optim
ELEMENT_WISE = frozenset({
    _optim.SGD, _optim.Adam, _optim.AdamW, _optim.Adamax, _optim.NAdam, _optim.RAdam,
    _optim.Adadelta, _optim.Adagrad, _optim.RMSprop, _optim.Rprop, _optim.ASGD,
})  # fmt: skip
LARGEST_BUCKET_BYTES = 128 * MIB
_WORTH_BYTES = parse_bytes("1MiB")  # below, a step's calls cost more than the memory is worth
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
    return min(bucket_bytes, LARGEST_BUCKET_BYTES) if bucket_bytes >= _LEAST_BYTES else 0


def default_bucket(state_bytes: int, whole_bytes: int, num_slots: int) -> int:
    """Returns the bucket of a step that was given none: the one that fits, where it helps.

    Of a state that one bucket has wholly, a slot has no more than that: then it is as without an
    offload.

    Args:
        state_bytes: What the step would have on the device without an offload.
        whole_bytes: The largest part of it that cannot be cut.
        num_slots: The buckets that a step has there at once.
    """
    bucket_bytes = fitting_bucket(state_bytes, num_slots)
    is_worth = bucket_bytes >= _WORTH_BYTES and num_slots * whole_bytes <= state_bytes
    return bucket_bytes if is_worth else LARGEST_BUCKET_BYTES
