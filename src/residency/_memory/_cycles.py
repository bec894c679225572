"""How many bytes of the device nothing but reference cycles keep.

Only a garbage collection frees them. Whether one pays is worth knowing first: it goes through every
object of the process, and runs finalizers of strangers. The search begins at what is likely to
lead to all tensors, the locals of running code, and ends as soon as it has met them.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Iterable

import torch

from residency._memory import _objects
from residency._memory._holders._autograd import Graphs
from residency._memory._holders._holders import STORAGE, add_held_by_cpp, follow_torch, storages_of
from residency._memory._holders._roots import (
    frames_read,
    named_by_modules,
    named_by_threads,
    namespaces,
)
from residency._memory._holders._walk import Origin, Walk


def bytes_in_cycles(device: torch.device, *, seconds: float | None = None) -> int | None:
    """Returns the bytes of a device's tensors that only reference cycles keep.

    Calls no code of the objects that it looks at, and keeps none of them alive.

    Args:
        device: The accelerator.
        seconds: Of this thread's own work, after which the search ends.

    Returns:
        The bytes of their storages; None where the search did not come to its end in time.
    """
    # A subclass of Tensor would otherwise answer for itself, and may make tensors as it does.
    with frames_read() as touched, torch._C.DisableTorchFunction():
        return _search(device, seconds, touched)


def _search(
    device: torch.device, seconds: float | None, touched: list[types.FrameType]
) -> int | None:
    population = gc.get_objects()  # first of all: what is made for the search is not in it
    tensors = _tensors_on(device, population)
    if not tensors:
        return 0
    walk = Walk([*namespaces(), touched, tensors], seconds=seconds)
    try:
        graphs = Graphs(walk)
        for roots in (named_by_threads(touched), named_by_modules()):
            for thing, name in roots:
                walk.add(thing, Origin(name))
            walk.go()
            follow_torch(walk, graphs)
            if all(map(walk.has_seen, tensors)):
                return 0
        if walk.is_complete:
            add_held_by_cpp(walk, population)
            follow_torch(walk, graphs)
        return _only_in(tensors, walk) if walk.is_complete else None
    finally:
        walk.clear()


def _tensors_on(device: torch.device, population: list[object]) -> list[object]:
    kinds = {cls for cls in set(map(type, population)) if torch.Tensor in _objects.bases(cls)}
    return [
        thing
        for thing in population
        if type(thing) in kinds
        and any(_objects.slot(storage, "device") == device for storage in storages_of(thing))
    ]


def _only_in(tensors: Iterable[object], walk: Walk) -> int:
    """Returns the bytes of storages that no tensor has which the walk met."""
    in_use, unseen = set(), {}
    for tensor in tensors:
        for storage in storages_of(tensor):
            key = _objects.slot(storage, "_cdata")
            if walk.has_seen(tensor):
                in_use.add(key)
            else:
                unseen[key] = int(STORAGE.nbytes(storage))
    return sum(num_bytes for key, num_bytes in unseen.items() if key not in in_use)
