"""Which home the tensors of the device went to that callers may still have.

On a plain optimizer such a tensor is the state. A caller who assigns it once more, or a view of it,
means that state: its home. Invariant, which ``tests/optim/test_arrivals.py`` tries to break: a
tensor is known only as long as its storage lives, and as long as no code has written to it since.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from residency._dtensor import write_count
from residency._storages import is_gone, span_of, weak_reference


class Arrival(NamedTuple):
    """A tensor of the device that went home.

    Attributes:
        storage: Its storage, while that lives.
        first: The address of its first byte.
        last: The address after its last one.
        version: How often it had been written to.
        home: Where it went, while that lives.
    """

    storage: StorageWeakRef
    first: int
    last: int
    version: int
    home: weakref.ref[Any]

    @property
    def is_over(self) -> bool:
        return is_gone(self.storage)


class Arrivals:
    """The tensors that went to the homes of one optimizer, by the address of their storage."""

    def __init__(self) -> None:
        self._by_storage: dict[int, list[Arrival]] = {}
        self._num_swept = 0

    def note(self, tensor: Tensor, home: Any) -> None:
        """Takes note that the bytes of a plain tensor went to a ``Home`` as they lay."""
        span = None if tensor.is_cpu or tensor.is_inference() else span_of(tensor)
        if span is None or tensor.stride() != home.tensor.stride():
            return
        self._sweep()
        storage = tensor.untyped_storage()
        near = self._by_storage.setdefault(storage.data_ptr(), [])
        near[:] = [each for each in near if not each.is_over and each[1:3] != span[1:]]
        weak = weak_reference(storage)
        near.append(Arrival(weak, span.first, span.last, write_count(tensor), weakref.ref(home)))

    def find(self, tensor: Tensor) -> tuple[Any, int] | None:
        """Returns the ``Home`` of a plain tensor, and at which of its bytes the tensor begins."""
        if tensor.is_cpu or tensor.is_inference() or not self._by_storage:
            return None
        span = span_of(tensor)
        if span is None:
            return None
        for each in self._by_storage.get(tensor.untyped_storage().data_ptr(), ()):
            home = each.home()
            is_inside = each.first <= span.first and span.last <= each.last
            is_known = not each.is_over and each.version == write_count(tensor)
            if home is not None and is_inside and is_known:
                return home, span.first - each.first
        return None

    def beside(self, tensor: Tensor) -> list[tuple[Any, int]]:
        """Returns each ``Home`` that has some bytes of a plain tensor, and its first address."""
        span = None if tensor.is_cpu or tensor.is_inference() else span_of(tensor)
        if span is None:
            return []
        return [
            (home, each.first)
            for each in self._by_storage.get(tensor.untyped_storage().data_ptr(), ())
            if each.first < span.last and span.first < each.last
            if not each.is_over and each.version == write_count(tensor)
            if (home := each.home()) is not None
        ]

    def move(self, moved: Mapping[Any, Any]) -> None:
        """Takes note that homes have others in their place."""
        for near in self._by_storage.values():
            near[:] = [
                each._replace(home=weakref.ref(moved[home])) if home in moved else each
                for each in near
                for home in [each.home()]
            ]

    def _sweep(self) -> None:
        """Forgets what died, now and then."""
        if len(self._by_storage) > 2 * self._num_swept + 64:
            alive = {
                address: near
                for address, near in self._by_storage.items()
                if not all(each.is_over for each in near)
            }
            self._by_storage, self._num_swept = alive, len(alive)
