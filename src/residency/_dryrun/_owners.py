"""Which blocks of the device are parameters, gradients or optimizer state.

A block is known by its address, which is that of a tensor's storage.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from residency._dtensor import local_of
from residency._optim import record_of

PARAMETERS, GRADIENTS, STATE = "parameters", "gradients", "optimizer state"
_LOOKS_APART = 10  # times as long as a look takes
_DEEPEST = 4  # of the lists and dicts that a parameter's state is


class OwnersOfBlocks:
    """The modules and optimizers of the process."""

    def __init__(self) -> None:
        """Knows none yet."""
        self._modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        register_optimizer_step_pre_hook(lambda optimizer, *_: self._optimizers.add(optimizer))
        self._next_look = 0.0

    def look(self) -> None:
        """Finds the modules and optimizers that there are now, in a small share of the time."""
        started = time.monotonic()
        if started < self._next_look:
            return
        for found in gc.get_objects():
            kind = type(found)
            if issubclass(kind, torch.nn.Module):
                self._modules.add(found)
            elif issubclass(kind, Optimizer):
                self._optimizers.add(found)
        ended = time.monotonic()
        self._next_look = ended + _LOOKS_APART * (ended - started)

    def kinds(self) -> dict[int, str]:
        """Returns what the blocks are that parameters, gradients and states begin at."""
        kinds: dict[int, str] = {}
        parameters: list[Any] = []
        for module in list(self._modules):
            for table in (module.__dict__.get("_parameters"), module.__dict__.get("_buffers")):
                parameters += [each for each in (table or {}).values() if each is not None]
        for optimizer in list(self._optimizers):
            for group in getattr(optimizer, "param_groups", ()):
                parameters += group["params"]
            if record_of(optimizer) is None:
                for values in dict.values(getattr(optimizer, "state", {})):
                    _note(kinds, STATE, _tensors(values, 0))
        gradients = [each.grad for each in parameters if each.is_leaf and each.grad is not None]
        _note(kinds, GRADIENTS, gradients)
        _note(kinds, PARAMETERS, parameters)
        return kinds


def _note(kinds: dict[int, str], kind: str, tensors: Any) -> None:
    for tensor in tensors:
        for part in _parts(tensor):
            if part.device.type != "cuda":
                continue
            try:
                kinds[part.untyped_storage().data_ptr()] = kind
            except (NotImplementedError, RuntimeError, ValueError):
                continue  # lazy, sparse, or freed by its framework for the moment


def _parts(tensor: Any) -> Iterator[torch.Tensor]:
    """Yields a tensor, or those that it is made of: a DTensor's local one."""
    tensor = local_of(tensor)
    inner = [each for each in vars(tensor).values() if isinstance(each, torch.Tensor)]
    if type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or not inner:
        inner = [tensor]
    yield from inner


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < _DEEPEST and isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _tensors(inner, depth + 1)
