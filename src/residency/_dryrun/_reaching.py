"""Which loads of a script are a resume: those that reach what is trained.

A file's tensors are known weakly. They reach a module or an optimizer when a state dict with them
is loaded into it; their names may be others then, and the state dict another. What a script loads
beside that is no resume: a pipeline for pictures, a judge, the best weights for a last evaluation
by another module.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from residency._memory import ImportWatch, open_phases

_DEEPEST = 6  # of the dicts and lists of a checkpoint
_LOAD = "load"  # how the phases of loads end


class LoadsOfTrained:
    """The watch over loads that reach what a script trains."""

    def __init__(
        self, is_trained: Callable[[Iterable[Tensor]], bool], resume: Callable[[], None]
    ) -> None:
        """Prepares; nothing is changed until `start`.

        Args:
            is_trained: Returns whether an optimizer steps one of some parameters.
            resume: What is called after each load that reaches some.
        """
        self._is_trained = is_trained
        self._resume = resume
        self._loaded: list[weakref.ref[Tensor]] = []

    def start(self) -> None:
        """Watches from now on, also in modules that are imported later."""
        torch_module: Any = torch
        torch_module.load = self._noting(torch.load)
        modules: Any = nn.Module
        modules.load_state_dict = self._taking(modules.load_state_dict, _of_module)
        optimizers: Any = Optimizer
        optimizers.load_state_dict = self._taking(optimizers.load_state_dict, _of_optimizer)
        watched = {
            "safetensors.torch": self._watch_files,
            "torch.distributed.checkpoint": self._watch_distributed,
            "residency._checkpoint._checkpointer": self._watch_checkpointer,
        }
        ImportWatch(watched).start()

    def _watch_files(self, module: ModuleType) -> None:
        module.__dict__["load_file"] = self._noting(vars(module)["load_file"])

    def _watch_distributed(self, module: ModuleType) -> None:
        """Takes what is loaded in place as read, and as taken where it is a parameter itself."""
        load = vars(module)["load"]

        @functools.wraps(load)
        def loaded(state_dict: object, *args: object, **options: object) -> object:
            result = load(state_dict, *args, **options)
            self._note(state_dict)
            if self._is_trained(_tensors(state_dict)):
                self._resume()
            return result

        module.__dict__["load"] = loaded

    def _watch_checkpointer(self, module: ModuleType) -> None:
        checkpointers: Any = vars(module)["Checkpointer"]
        restore = checkpointers.restore

        @functools.wraps(restore)
        def restored(*args: object, **options: object) -> object:
            result = restore(*args, **options)
            self._resume()  # it fills what it is given, which is the run
            return result

        checkpointers.restore = restored

    def _noting(self, load: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(load)
        def loaded(*args: object, **options: object) -> object:
            result = load(*args, **options)
            self._note(result)
            return result

        return loaded

    def _note(self, value: object) -> None:
        self._loaded = [each for each in self._loaded if each() is not None]
        self._loaded += map(weakref.ref, _tensors(value))

    def _taking(
        self, take: Callable[..., object], parameters: Callable[[Any], Iterable[Tensor]]
    ) -> Callable[..., object]:
        @functools.wraps(take)
        def taken(owner: Any, state_dict: object, *args: object, **options: object) -> object:
            is_loaded = self._is_loading() or self._holds_loaded(state_dict)
            result = take(owner, state_dict, *args, **options)
            if is_loaded and self._is_trained(parameters(owner)):
                self._resume()
            return result

        return taken

    def _is_loading(self) -> bool:
        return any(visit.name.endswith(_LOAD) for visit in open_phases())

    def _holds_loaded(self, state_dict: object) -> bool:
        found = (each() for each in self._loaded)
        return share(_tensors(state_dict), (each for each in found if each is not None))


def share(tensors: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    """Returns whether one of some tensors is one of others, or has its bytes."""
    ids, addresses = set(), {0}
    for each in others:
        ids.add(id(each))
        addresses.add(_address(each))
    addresses.discard(0)
    return any(id(each) in ids or _address(each) in addresses for each in tensors)


def _of_module(module: nn.Module) -> Iterable[Tensor]:
    return module.parameters()


def _of_optimizer(optimizer: Optimizer) -> Iterable[Tensor]:
    return (each for group in optimizer.param_groups for each in group["params"])


def _address(tensor: Tensor) -> int:
    """Returns where a tensor's bytes are; 0 of one that has none of its own."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def _tensors(value: object, depth: int = 0) -> Iterator[Tensor]:
    """Yields the tensors of a checkpoint: modules may be in it, too."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
    elif depth < _DEEPEST and isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each, depth + 1)
