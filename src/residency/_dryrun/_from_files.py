"""Which tensors a script has read from files, or made of those: moved, cast or copied ones."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from residency._dryrun._methods import around, replace_method

_MAKERS = ["to", "cuda", "cpu", "half", "float", "bfloat16", "double", "type", "clone",
           "contiguous", "__deepcopy__"]  # fmt: skip


class FromFiles:
    """The tensors that are from files, known weakly, by themselves and by where their bytes are."""

    def __init__(self, copied: Callable[[Tensor], None]) -> None:
        """Begins with none.

        Args:
            copied: What is called with each tensor that one of them was copied into.
        """
        self._known: dict[int, weakref.ref[Tensor]] = {}
        self._copied = copied

    def watch(self) -> None:
        """Follows what a script makes of them from now on."""
        for name in _MAKERS:
            replace_method(name, self._following(getattr(Tensor, name)))
        copy = Tensor.copy_

        @around(copy, names=("self", "other"))
        def copied(tensor: Tensor, source: Any, *args: Any, **options: Any) -> Tensor:
            result = copy(tensor, source, *args, **options)
            if self.has(source):
                self._copied(tensor)
            return result

        replace_method("copy_", copied)

    def _following(self, make: Callable[..., Any]) -> Callable[..., Any]:
        @around(make)
        def made(tensor: Tensor, *args: object, **options: object) -> Any:
            result = make(tensor, *args, **options)
            if isinstance(result, Tensor) and self.has(tensor):
                self.add([result])
            return result

        return made

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Takes tensors as from a file."""
        for each in tensors:
            for key in _keys(each):
                self._known[key] = weakref.ref(each, functools.partial(self._drop, key))

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """Takes them as from no file any more, as a training changes them."""
        for each in tensors if self._known else ():
            for key in _keys(each):
                self._known.pop(key, None)

    def has(self, value: object) -> bool:
        """Returns whether a value is such a tensor, or has the bytes of one."""
        if not self._known or not isinstance(value, Tensor):
            return False
        return any(key in self._known for key in _keys(value))

    def _drop(self, key: int, gone: weakref.ref[Tensor]) -> None:
        if self._known.get(key) is gone:
            del self._known[key]


def _keys(tensor: Tensor) -> list[int]:
    """Returns what a tensor is known by: itself, and where its bytes are (no object is there)."""
    address = address_of(tensor)
    return [id(tensor), address] if address else [id(tensor)]


def address_of(tensor: Tensor) -> int:
    """Returns where a tensor's bytes are; 0 of one that has none of its own."""
    if torch.nn.parameter.is_lazy(tensor):
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0
