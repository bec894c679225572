"""Modules and optimizers whose bytes wait on the host, for as long as another needs the device.

Read ``_park`` first (the two public functions), then ``_parking`` (one parking and its end),
``_tensors`` (what an owner has), ``_storages`` (bytes that several tensors share), ``_guards``
(what a use of a parked tensor raises) and ``_room`` (whether the device has room again).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency._lazy import door

if TYPE_CHECKING:
    from residency._park._park import is_parked, park, remember, unpark
    from residency._park._parking import Parking
    from residency._park._room import DoesNotFitError
    from residency._park._tensors import fsdp_groups, tensors_of

__all__ = [
    "DoesNotFitError",
    "Parking",
    "fsdp_groups",
    "is_parked",
    "park",
    "remember",
    "tensors_of",
    "unpark",
]

__getattr__ = door(
    __name__,
    {
        "_park": ["is_parked", "park", "remember", "unpark"],
        "_parking": ["Parking"],
        "_room": ["DoesNotFitError"],
        "_tensors": ["fsdp_groups", "tensors_of"],
    },
)
