"""Frozen parameters that live on the host and come to the device block by block.

Read ``_stream`` first (the public function and what it returns), then ``_passes`` (the forward and
backward passes through units), ``_slots`` (the units that are on the device, and the waits),
``_homes`` (where the bytes are), ``_units`` (which modules are units) and ``_guards`` (calls and
moves of modules).
"""

from residency._frozen._statistics import FrozenStatistics as FrozenStatistics
from residency._frozen._stream import (
    FrozenStream as FrozenStream,
    stream_frozen as stream_frozen,
)
