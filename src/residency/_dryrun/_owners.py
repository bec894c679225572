"""Which blocks of the device are parameters, gradients or optimizer state.

A block is known by its address, which is that of a tensor's storage.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from residency._dryrun._methods import Function, put_around
from residency._dtensor import local_of
from residency._transfer import state_stays

PARAMETERS, GRADIENTS, STATE = "parameters", "gradients", "optimizer state"
_DEEPEST = 4  # of the lists and dicts that a parameter's state is
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


class OwnersOfBlocks:
    """The modules and optimizers of the process.

    Attributes:
        optimizers: Those that there are, whether or not they have made a step.
        has_optimizer: Whether one was made, which may be gone.
    """

    def __init__(self) -> None:
        """Knows none yet."""
        # By their ids: a metric's hash is of attributes that it has not got yet.
        self._modules: weakref.WeakValueDictionary[int, torch.nn.Module]
        self._modules = weakref.WeakValueDictionary()
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.has_optimizer = False

    def start(self) -> None:
        """Gets to know all that is made from now on, as a copy or from a pickle, too."""
        kinds: tuple[tuple[Any, Any], ...] = (
            (torch.nn.Module, lambda module: self._modules.update({id(module): module})),
            (Optimizer, self._add_optimizer),
        )
        for kind, add in kinds:
            for name in ("__init__", "__setstate__"):
                put_around(kind, name)(_telling(add))

    def _add_optimizer(self, optimizer: Optimizer) -> None:
        self.optimizers.add(optimizer)
        self.has_optimizer = True

    @state_stays()  # what waits for its first use waits on
    def kinds(self) -> dict[int, str]:
        """Returns what the blocks are that parameters, gradients and states begin at."""
        kinds: dict[int, str] = {}
        parameters: list[Any] = []
        for module in list(self._modules.values()):
            for table in (module.__dict__.get("_parameters"), module.__dict__.get("_buffers")):
                parameters += [each for each in (table or {}).values() if each is not None]
        for optimizer in list(self.optimizers):
            for group in getattr(optimizer, "param_groups", ()):
                parameters += group["params"]
            # Of an offloaded one, as it lies there: what is read by a key is waited for.
            for values in dict.values(getattr(optimizer, "state", {})):
                _note(kinds, STATE, _tensors(values, 0))
        gradients = [each.grad for each in parameters if each.is_leaf and each.grad is not None]
        _note(kinds, GRADIENTS, gradients)
        _note(kinds, PARAMETERS, parameters)
        return kinds


def _telling(add: Any) -> Any:
    def made(make: Function, self: Any, *args: object, **options: object) -> None:
        make(self, *args, **options)
        add(self)

    return made


def _note(kinds: dict[int, str], kind: str, tensors: Any) -> None:
    for tensor in tensors:
        is_dense = type(tensor) in _PLAIN and not tensor.is_sparse
        for part in (tensor,) if is_dense else _parts(tensor):
            if not part.is_cuda:
                continue
            try:
                kinds[part.untyped_storage().data_ptr()] = kind
            except (NotImplementedError, RuntimeError, ValueError):
                continue  # lazy, or freed by its framework for the moment


def _parts(tensor: Any) -> Iterator[torch.Tensor]:
    """Yields a tensor, or those that it is made of: a DTensor's local one, of a sparse one two."""
    tensor = local_of(tensor)
    if tensor.is_sparse:  # by private names: the public ones refuse what is not coalesced
        yield from (tensor._indices(), tensor._values())
        return
    inner = [each for each in vars(tensor).values() if isinstance(each, torch.Tensor)]
    yield from inner if inner and type(tensor) not in _PLAIN else (tensor,)


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < _DEEPEST and isinstance(value, dict | list | tuple):
        for inner in dict.values(value) if isinstance(value, dict) else value:
            yield from _tensors(inner, depth + 1)
