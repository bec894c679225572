"""Sets of living objects that the whole process shares.

An object that is in one dies as if it were not. Invariant, which ``tests/test_registries.py`` tries
to break: every operation is one step of a dict, so that threads, finalizers and a fork find the set
whole at any moment; an iteration has a copy.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class _Ref(weakref.ref[T]):
    """A weak reference that knows under which number it is kept."""

    __slots__ = ("key",)
    key: int


class WeakRegistry(Generic[T]):
    """A set of objects, by identity, that keeps none of them alive and is safe for threads.

    A ``weakref.WeakSet`` raises "Set changed size during iteration" where another thread adds.
    """

    def __init__(self) -> None:
        refs: dict[int, weakref.ref[T]] = {}

        def forget(ref: weakref.ref[T]) -> None:
            key = getattr(ref, "key", None)  # None where an interrupt left it half made
            if key is not None and refs.get(key) is ref:  # another may have the number by now
                refs.pop(key, None)

        self._refs = refs
        self._forget = forget

    def add(self, thing: T) -> None:
        """Takes an object in; one that is in stays."""
        ref = _Ref(thing, self._forget)
        ref.key = id(thing)
        self._refs[ref.key] = ref

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


class Turn:
    """A holder's right to something for itself; its end is the end of the turn.

    Attributes:
        is_over: Whether the holder said so, while a caller still has this object.
    """

    def __init__(self) -> None:
        self.is_over = False


class Turns:
    """The holders that have something for themselves: at most one of each key.

    A holder that an interrupt keeps from saying that its turn is over loses it with the ``Turn``.
    """

    def __init__(self) -> None:
        self._turns: weakref.WeakValueDictionary[Hashable, Turn] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def take(self, key: Hashable) -> Turn | None:
        """Returns a turn, to be kept as long as it lasts; None where another one has it."""
        turn = Turn()
        with self._lock:
            there = self._turns.get(key)
            if there is not None and not there.is_over:
                return None
            self._turns[key] = turn
        return turn

    def __len__(self) -> int:
        return sum(1 for turn in list(self._turns.values()) if not turn.is_over)
