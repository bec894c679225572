"""Modules and optimizers whose bytes wait on the host, for as long as another needs the device.

Read ``_park`` first (two public functions), then ``_parked`` (both around a block), ``_parking``
(one parking and its end), ``_tensors`` (what an owner has), ``_storages`` (bytes that several
tensors share), ``_guards`` (what a use of a parked tensor raises) and ``_room`` (whether the device
has room again).
"""

from residency._park._park import (
    is_parked as is_parked,
    park as park,
    remember as remember,
    unpark as unpark,
)
from residency._park._parked import parked as parked
from residency._park._parking import Parking as Parking
from residency._park._room import DoesNotFitError as DoesNotFitError
from residency._park._tensors import fsdp_groups as fsdp_groups, tensors_of as tensors_of
