"""Which loads of a script are a resume: those that reach what is trained.

A file's tensors, and what is made of them, are known weakly (``_from_files``). They reach a module
or an optimizer when a state dict with them is loaded into it, or one is copied into a parameter;
their names may be others then, and the state dict another. What a script loads
beside that is no resume: a pipeline for pictures, a judge, the best weights for a last evaluation
by another module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from residency._dryrun._from_files import FromFiles
from residency._dryrun._methods import Function, put_around
from residency._dryrun._steering import Steering
from residency._dryrun._telling import Telling
from residency._memory import ImportWatch, open_phases

_DEEPEST = 6  # of the dicts and lists of a checkpoint
_LOAD = "load"  # how the phases of loads end


class LoadsOfTrained:
    """The watch over loads that reach what a script trains."""

    def __init__(self, telling: Telling) -> None:
        """Prepares; nothing is changed until `start`."""
        self._telling = telling
        self._from_files = FromFiles(self._copied)
        self._num_taking = 0  # state dicts that are being loaded

    def start(self) -> None:
        """Watches from now on, also in modules that are imported later."""
        put_around(torch, "load")(self._read)
        put_around(nn.Module, "load_state_dict")(self._taking(_of_module))
        put_around(Optimizer, "load_state_dict")(self._taking(_of_optimizer))
        watched = {
            "safetensors": self._watch_opened,
            "safetensors.torch": self._watch_files,
            "torch.distributed.checkpoint": self._watch_distributed,
            "residency._checkpoint._checkpointer": self._watch_checkpointer,
        }
        ImportWatch(watched).start()
        self._from_files.watch()

    def forget(self, parameters: Iterable[Tensor]) -> None:
        """Takes parameters as from no file any more, as they are trained."""
        self._from_files.forget(parameters)

    def _watch_opened(self, module: ModuleType) -> None:
        """Notes each tensor that is read of an open file."""
        own = {"native": staticmethod(module.safe_open), "note": staticmethod(self._noting)}
        module.__dict__["safe_open"] = type("safe_open", (_OpenFile,), own)

    def _watch_files(self, module: ModuleType) -> None:
        put_around(module, "load_file")(self._read)

    def _watch_distributed(self, module: ModuleType) -> None:
        """Takes what is loaded in place as read, and as taken where it is a parameter itself."""

        @put_around(module, "load")
        def loaded(load: Function, state_dict: object, *args: object, **options: object) -> object:
            result = load(state_dict, *args, **options)
            self._note(state_dict)
            self._telling.reach(_tensors(state_dict))
            return result

    def _watch_checkpointer(self, module: ModuleType) -> None:
        @put_around(module.Checkpointer, "restore")
        def restored(restore: Function, *args: object, **options: object) -> object:
            result = restore(*args, **options)
            self._telling.tell(Steering.loaded, True)  # it fills what it is given, which is the run
            return result

    def _read(self, load: Function, *args: object, **options: object) -> object:
        result = load(*args, **options)
        self._note(result)
        return result

    def _noting(self, load: Callable[..., object]) -> Callable[..., object]:
        return functools.partial(self._read, load)

    def _note(self, value: object) -> None:
        if not self._telling.state.is_new:  # of a thousand tensors of a file the first is enough
            self._telling.tell(Steering.read)
        self._from_files.add(_tensors(value))

    def _copied(self, into: Tensor) -> None:
        """Tells of a tensor that a script has copied into by itself; once one was a resume, of none
        before the next file: to look whether it is trained takes as long as there are tensors.
        """
        if self._telling.state.is_new and not self._num_taking:
            self._telling.reach([into], is_copied=True)

    def _taking(self, parameters: Callable[[Any], Iterable[Tensor]]) -> Callable[..., object]:
        def taken(
            take: Function, owner: Any, state_dict: object, *args: Any, **options: Any
        ) -> object:
            is_loaded = self._is_loading() or any(map(self._from_files.has, _tensors(state_dict)))
            self._num_taking += 1
            try:
                result = take(owner, state_dict, *args, **options)
            finally:
                self._num_taking -= 1
            if is_loaded:
                self._telling.reach(parameters(owner))
            return result

        return taken

    def _is_loading(self) -> bool:
        return any(visit.name.endswith(_LOAD) for visit in open_phases())


class _OpenFile:
    """A file opened as by ``safetensors.safe_open``, whose class is native and cannot be changed.

    Attributes:
        native: That class.
        note: Returns a function that notes what another one reads.
    """

    native: Callable[..., Any]
    note: Callable[[Callable[..., object]], Callable[..., object]]

    def __init__(self, *args: Any, **options: Any) -> None:
        self._file = self.native(*args, **options)

    def __enter__(self) -> Any:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._file, name)
        return self.note(found) if name.startswith("get_tensor") else found


def _of_module(module: nn.Module) -> Iterable[Tensor]:
    return module.parameters()


def _of_optimizer(optimizer: Optimizer) -> Iterable[Tensor]:
    return (each for group in optimizer.param_groups for each in group["params"])


def _tensors(value: object, depth: int = 0) -> Iterator[Tensor]:
    """Yields the tensors of a checkpoint: modules may be in it, too."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
    elif depth < _DEEPEST and isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each, depth + 1)
