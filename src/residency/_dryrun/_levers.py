"""The changes that a dry run makes in a script to see whether it then fits.

What residency offers, and what the script does itself.

The changes are made from outside, by hooks, in the child of a run that ``--fit`` or ``--largest``
has asked for. In every run it is noted which numbers and switches the script's command line has.
"""

from __future__ import annotations

import argparse
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

import residency
from residency._dryrun._host import LARGE_BYTES
from residency._dryrun._methods import Function, around, put_around
from residency._dryrun._resumes import Loads, Templates, defer_state
from residency._dryrun._settings import RunSettings
from residency._dryrun._trainers import Trainers
from residency._memory import open_phases
from residency._optim import record_of

_RECOMPUTES = "_residency_recomputes"  # of a module, and of a class's function
# Which of these a script uses decides what it is advised to write.
_LIBRARIES = ("accelerate", "lightning", "peft", "pytorch_lightning", "transformers.trainer")


class Levers:
    """The changes of one process, as its settings say."""

    def __init__(self, settings: RunSettings) -> None:
        """Prepares; nothing is changed until `start`."""
        self._settings = settings
        self._arguments: dict[str, dict[str, object]] = {}
        self._recomputed: str | list[str] = []
        self._trainers = Trainers(settings)
        self._templates: Templates | None = None
        self._loads = Loads(on_host=settings.loads_on_host)
        self._has_buckets = False

    def start(self) -> None:
        """Makes the changes, also in modules that are imported later."""
        settings = self._settings
        self._watch_arguments()
        self._watch_buckets()
        self._trainers.start()
        self._loads.start()
        offload_all = None if settings.offload is None else _offload(settings.offload)
        self._templates = Templates(offload_all, on_host=settings.defers_template)
        self._templates.start()
        if settings.defers_state or settings.defers_template:
            defer_state()
        if settings.saves_on_host:
            _clone_on_host()
        if settings.parks_state:
            _park_state()
        if settings.checkpointing:
            self._recompute()

    def found(self) -> dict[str, object]:
        """Returns what the search for settings needs to know of the script."""
        return {
            "arguments": self._arguments,
            "recomputed": self._recomputed,
            "trainer": self._trainers.found,
            "loads_on_device": self._loads.are_on_device,
            "loads_state": self._loads.have_state,
            "has_buckets": self._has_buckets,
            "has_template": self._templates is not None and self._templates.are_made,
            "libraries": [name for name in _LIBRARIES if name in sys.modules],
        }

    def words(self) -> list[str]:
        """Returns what the script's command would say for the arguments that it was given."""
        words = []
        for name, value in self._settings.arguments.items():
            if name in self._arguments:
                flag = str(self._arguments[name]["flag"])
                words += [flag] if isinstance(value, bool) else [flag, str(value)]
        return words

    def _watch_arguments(self) -> None:
        """Notes the numbers and switches that a parser returns, and gives it others."""

        @put_around(argparse.ArgumentParser, "parse_known_args")
        def parsed(
            parse: Function, parser: Any, *args: object, **options: object
        ) -> tuple[Any, list[str]]:
            values, rest = parse(parser, *args, **options)
            for action in parser._actions:  # argparse shows its options in no other way
                value = getattr(values, action.dest, None)
                if not action.option_strings or not isinstance(value, int):
                    continue
                flag = max(action.option_strings, key=len)
                self._arguments[action.dest] = {"flag": flag, "value": value}
                if action.dest in self._settings.arguments:
                    setattr(values, action.dest, self._settings.arguments[action.dest])
            return values, rest

    def _watch_buckets(self) -> None:
        """Notes whether gradients lie beside DDP's buckets, which they else are made views of."""

        @put_around(nn.parallel.DistributedDataParallel, "__init__")
        def init(make: Function, replica: Any, *args: object, **options: object) -> None:
            if self._settings.views_buckets:
                options["gradient_as_bucket_view"] = True
            make(replica, *args, **options)
            self._has_buckets |= not replica.gradient_as_bucket_view

    def _recompute(self) -> None:
        """Makes the outermost module of each forward pass recompute what its blocks keep."""
        seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()

        def before_forward(module: nn.Module, arguments: object) -> None:
            if module in seen:
                return
            seen.update(module.modules())
            self._recomputed = _enable_of_library(module) or _wrap_blocks(module)

        register_module_forward_pre_hook(before_forward)


def _offload(resident: int) -> Callable[[], None]:
    """Offloads optimizers before they load a state, or before the first forward pass.

    Not in a step: that goes on as the class has it which the optimizer had before.

    Returns:
        What offloads those that there are.
    """
    made: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    @put_around(Optimizer, "__init__")
    def init(make: Function, optimizer: Any, *args: object, **options: object) -> None:
        make(optimizer, *args, **options)
        if not isinstance(optimizer, residency.OffloadedOptimizer):
            made.add(optimizer)

    def offload_all() -> None:
        while made:
            optimizer = made.pop()
            if record_of(optimizer) is None:
                residency.offload_optimizer(optimizer, resident=resident)

    @put_around(Optimizer, "load_state_dict")
    def load_state_dict(load: Function, optimizer: Any, state_dict: Any) -> None:
        if optimizer in made:
            offload_all()
            optimizer.load_state_dict(state_dict)  # of the class that it has now
        else:
            load(optimizer, state_dict)

    def before_forward(module: nn.Module, arguments: object) -> None:
        if made and torch.is_grad_enabled() and not _is_in_step():
            offload_all()

    register_module_forward_pre_hook(before_forward)
    return offload_all


def _is_in_step() -> bool:
    return any(visit.name == "optimizer_step" for visit in open_phases())


def _clone_on_host() -> None:
    """Makes copies on the host, but for those that a script computes with."""
    thread = threading.local()  # whether it copies a part of a module

    def is_for_save(tensor: Tensor) -> bool:
        # What a pass computes with has a graph, and an optimizer's own copies are in its step.
        return (
            type(tensor) is Tensor
            and tensor.is_cuda
            and not tensor.requires_grad
            and tensor.nbytes >= LARGE_BYTES
            and not getattr(thread, "copies_part", False)
            and not _is_in_step()
        )

    @put_around(Tensor, "clone")
    def cloned(clone: Function, tensor: Tensor, *args: object, **options: object) -> Tensor:
        copied: Tensor = tensor.cpu() if is_for_save(tensor) else clone(tensor, *args, **options)
        return copied

    @put_around(Tensor, "__deepcopy__")
    def deep_copied(deep_copy: Function, tensor: Tensor, memo: dict[int, object]) -> Tensor:
        # A copy of a module is there to compute with, as an average of it or a teacher.
        if any(isinstance(each, nn.Module) for each in memo.values()):
            return as_part(deep_copy, tensor, memo)
        copied: Tensor = tensor.cpu() if is_for_save(tensor) else deep_copy(tensor, memo)
        return copied

    def as_part(copy: Function, part: Tensor, memo: dict[int, object]) -> Tensor:
        thread.copies_part = True
        try:
            copied: Tensor = copy(part, memo)
            return copied
        finally:
            thread.copies_part = False

    put_around(nn.Parameter, "__deepcopy__")(as_part)


def _park_state() -> None:
    stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
    parked: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def bring_back(*_: object) -> None:
        while parked:
            residency.unpark(parked.pop())

    def before_forward(module: nn.Module, arguments: object) -> None:
        if torch.is_grad_enabled():
            bring_back()
            return
        for optimizer in [each for each in stepped if each not in parked]:
            residency.park(optimizer)
            parked.add(optimizer)

    def before_step(optimizer: Optimizer, *_: object) -> None:
        bring_back()
        stepped.add(optimizer)

    register_module_forward_pre_hook(before_forward)
    register_optimizer_step_pre_hook(before_step)


def _enable_of_library(module: nn.Module) -> str:
    """Makes the first model of transformers in a module recompute; "" without one."""
    for model in module.modules():
        found: Any = model
        if getattr(model, "supports_gradient_checkpointing", False):
            found.gradient_checkpointing_enable()
            if hasattr(model, "enable_input_require_grads"):
                found.enable_input_require_grads()
            return "transformers"
    return ""


def _wrap_blocks(module: nn.Module) -> list[str]:
    """Makes repeated blocks of a module recompute; returns the lists' names, "" for itself."""
    names = []
    for name, blocks in _repeated(module, ""):
        names.append(name)
        _let_recompute(type(blocks[0]))
        for block in blocks:
            block.__dict__[_RECOMPUTES] = True
    return names


def _let_recompute(kind: Any) -> None:
    """Makes modules of a class recompute that say so: a copy does, too, and none holds itself.

    A function of the module's own would be a cycle, which keeps a deleted model until the garbage
    collector finds it.
    """
    forward = kind.forward
    if getattr(forward, _RECOMPUTES, False):
        return

    @around(forward)
    def called(module: nn.Module, *args: Any, **options: Any) -> Any:
        if not vars(module).get(_RECOMPUTES):
            return forward(module, *args, **options)
        inner = functools.partial(forward, module)
        return checkpoint(inner, *args, use_reentrant=False, **options)

    setattr(called, _RECOMPUTES, True)
    kind.forward = called


def _repeated(module: nn.Module, name: str) -> Iterator[tuple[str, list[nn.Module]]]:
    """Yields the outermost lists of modules that are all of one class, with their names."""
    blocks = list(module.children())
    is_list = isinstance(module, nn.ModuleList | nn.Sequential) and len(blocks) > 1
    if is_list and len({type(block) for block in blocks}) == 1:
        if next(module.parameters(), None) is not None:
            yield name, blocks
        return
    for part, child in module.named_children():
        yield from _repeated(child, f"{name}.{part}".lstrip("."))
