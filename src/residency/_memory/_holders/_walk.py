"""Goes through everything that Python code can reach, and remembers how it got there.

Breadth first, from objects that have a name, so that the path that is found first is a shortest
one. Objects are taken in batches of some hundred: what a batch refers to is asked for, made unique
and compared with what was seen by C code, and so takes about as long for each object, however many
there are. Which object of a batch led to a find is worked out only when a path is asked for.

Forward from names, and not backward from tensors: ``gc.get_referrers`` does not see frozen objects,
nor locals of running frames.

[Note: tracked] Only objects that the garbage collector tracks are followed. A tuple or a dict that
is not tracked holds nothing but plain values; running frames are not tracked either, and their
locals are names to begin with.
"""

from __future__ import annotations

import bisect
import gc
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from residency._memory import _objects

_BATCH = 256
_NODE_SLOT = "next_functions"  # what every autograd node has


@dataclass(frozen=True, slots=True)
class Origin:
    """The reason why an object was looked at that no other Python object led to.

    Attributes:
        text: What its path begins with.
        after: The position of the object whose path follows the text, if one does.
        trail: What follows that path: ``".grad"``.
        is_saved: Whether autograd saved it.
        is_of_graph: Whether it is part of the graph of the object whose path follows.
    """

    text: str
    after: int | None = None
    trail: str = ""
    is_saved: bool = False
    is_of_graph: bool = False


class Walk:
    """One search. Objects that it reached are named by their position, in order of discovery."""

    def __init__(self, ignored: Iterable[object] = (), *, seconds: float | None = None) -> None:
        """Prepares a search.

        Args:
            ignored: Objects that are never looked into.
            seconds: Of this thread's own work, after which it stops, with `is_complete` false.
        """
        self.objects: list[object] = []
        self.tensors: list[int] = []
        self.storages: list[int] = []
        self.modules: list[int] = []
        self.optimizers: list[int] = []
        self.nodes: list[int] = []
        self.is_complete = True
        # By the clock of the thread: a machine that does other work cuts no search short.
        self._deadline = None if seconds is None else time.thread_time() + seconds
        self._origins: dict[int, Origin] = {}
        self._aliases: dict[int, list[Origin]] = {}
        self._seen = {id(thing) for thing in ignored}
        self._begins: list[
            int
        ] = []  # for each batch: its first position, and where its finds begin
        self._finds: list[int] = []
        self._next = 0
        self._indexes: dict[int, dict[int, int]] = {}
        self._kinds: dict[type, list[int] | None] = {}

    def has_seen(self, thing: object) -> bool:
        """Returns whether an object was reached, or is ignored."""
        return id(thing) in self._seen

    def pass_over(self, things: Iterable[object]) -> None:
        """Does not look into some objects before they are admitted."""
        self._seen.update(map(id, things))

    def admit(self, things: Iterable[object]) -> None:
        """Looks into what was passed over, once it is added or something leads there."""
        self._seen.difference_update(map(id, things))

    def is_telling(self, cls: type) -> bool:
        """Returns whether a class's objects are tensors, or what tensors are named by."""
        return self._kind_of(cls) is not None

    def add(self, thing: object, origin: Origin) -> None:
        """Takes up an object that nothing before it led to; the next `go` looks into it."""
        if id(thing) in self._seen:
            if _objects.is_a(thing, torch.Tensor):
                self._aliases.setdefault(id(thing), []).append(origin)
        elif gc.is_tracked(thing):
            self._seen.add(id(thing))
            self._origins[len(self.objects)] = origin
            self._take([thing])

    def go(self) -> None:
        """Looks into everything that was added, and into what that leads to."""
        objects, seen = self.objects, self._seen
        while self._next < len(objects):
            if self._deadline is not None and time.thread_time() > self._deadline:
                self.is_complete = False
                return
            batch = objects[self._next : self._next + _BATCH]
            self._begins.append(self._next)
            self._finds.append(len(objects))
            self._next += len(batch)
            found = filter(gc.is_tracked, gc.get_referents(*batch))  # [Note: tracked]
            table = {id(thing): thing for thing in found}
            fresh = set(table).difference(seen)
            if fresh:
                seen |= fresh
                self._take([table[key] for key in table if key in fresh])

    def clear(self) -> None:
        """Lets go of every object, also where one of them leads to this search."""
        self.objects.clear()

    def origin(self, position: int) -> Origin | None:
        """Returns why an object was looked at; None where another object led to it."""
        return self._origins.get(position)

    def aliases(self, thing: object) -> list[Origin]:
        """Returns under which other names a tensor was added."""
        return self._aliases.get(id(thing), [])

    def parent(self, position: int) -> int | None:
        """Returns the position of the object that led to this one; None where none does now.

        [Note: dicts] Before Python 3.13 an object has a dict of its attributes only once code
        asked for it, so that what it referred to itself may be a step further by now.
        """
        batch = bisect.bisect_right(self._finds, position) - 1
        key = id(self.objects[position])
        index = self._indexes.get(batch)
        if index is None:
            index = self._indexes[batch] = self._index(batch, through_dicts=False)
        if key not in index:
            index.update(self._index(batch, through_dicts=True) | index)
        return index.get(key)

    def _index(self, batch: int, *, through_dicts: bool) -> dict[int, int]:
        """Returns who refers to each object that a batch led to, the first one of the batch."""
        begin = self._begins[batch]
        index: dict[int, int] = {}
        for at, thing in enumerate(self.objects[begin : begin + self._length(batch)], begin):
            children = gc.get_referents(thing)
            if through_dicts:  # [Note: dicts]
                children = gc.get_referents(*(child for child in children if type(child) is dict))
            for child in children:
                index.setdefault(id(child), at)
        return index

    def parents(self, things: Iterable[object]) -> Iterator[tuple[int, int]]:
        """Yields every reached object that refers to one of these: its position, and the id."""
        wanted = {id(thing) for thing in things}
        for batch, begin in enumerate(self._begins):
            objects = self.objects[begin : begin + self._length(batch)]
            if wanted.isdisjoint(map(id, gc.get_referents(*objects))):
                continue
            for at, thing in enumerate(objects, begin):
                for key in wanted.intersection(map(id, gc.get_referents(thing))):
                    yield at, key

    def _length(self, batch: int) -> int:
        end = self._begins[batch + 1] if batch + 1 < len(self._begins) else self._next
        return end - self._begins[batch]

    def _take(self, fresh: list[object]) -> None:
        """Notes what was found, and sets apart what tensors can be named by."""
        begin = len(self.objects)
        self.objects += fresh
        kinds = self._kinds
        for cls in set(map(type, fresh)).difference(kinds):
            kinds[cls] = self._kind_of(cls)
        if any(kinds[cls] is not None for cls in set(map(type, fresh))):
            for position, thing in enumerate(fresh, begin):
                kind = kinds[type(thing)]
                if kind is not None:
                    kind.append(position)

    def _kind_of(self, cls: type) -> list[int] | None:
        """Returns the list for positions of a class's objects; None where they name nothing."""
        known = _objects.bases(cls)
        for base, kind in (
            (torch.Tensor, self.tensors),
            (torch.UntypedStorage, self.storages),
            (torch.nn.Module, self.modules),
            (torch.optim.Optimizer, self.optimizers),
        ):
            if base in known:
                return kind
        return self.nodes if any(_NODE_SLOT in _objects.type_dict(c) for c in known) else None
