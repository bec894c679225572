"""Sets of living objects that the whole process shares.

An object that is in one dies as if it were not. Invariant: every operation is one step of a dict,
so that threads, finalizers and a fork find the set whole at any moment; an iteration has a copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class WeakRegistry(Generic[T]):
    """A set of objects, by identity, that keeps none of them alive and is safe for threads.

    A ``weakref.WeakSet`` raises "Set changed size during iteration" where another thread adds.
    """

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[T]] = {}

    def add(self, thing: T) -> None:
        """Takes an object in; one that is in stays."""
        key, refs = id(thing), self._refs

        def forget(ref: weakref.ref[T]) -> None:
            if refs.get(key) is ref:  # another object may have the number by now
                refs.pop(key, None)

        self._refs[key] = weakref.ref(thing, forget)

    def discard(self, thing: T) -> None:
        """Lets an object go, if it is in."""
        self._refs.pop(id(thing), None)

    def clear(self) -> None:
        """Lets all go."""
        self._refs.clear()

    def __contains__(self, thing: object) -> bool:
        ref = self._refs.get(id(thing))
        return ref is not None and ref() is thing

    def __iter__(self) -> Iterator[T]:
        return iter([thing for ref in self._refs.copy().values() if (thing := ref()) is not None])

    def __len__(self) -> int:
        return sum(1 for _ in self)
