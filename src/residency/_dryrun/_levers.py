"""The changes that a dry run makes in a script to see whether it then fits.

What residency offers, and what the script does itself.

The changes are made from outside, by hooks, in the child of a run that ``--fit`` or ``--largest``
has asked for. In every run it is noted which numbers and switches the script's command line has.
"""

from __future__ import annotations

import argparse
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

import residency
from residency._dryrun._settings import RunSettings
from residency._memory import ImportWatch, open_phases
from residency._optim import record_of
from residency._units import MIB

_LARGE = MIB  # a smaller copy is let be
_RECOMPUTES = "_residency_recomputes"  # of a module, and of a class's function
# Which of these a script uses decides what it is advised to write.
_LIBRARIES = ("lightning", "peft", "pytorch_lightning", "transformers.trainer")


class Levers:
    """The changes of one process, as its settings say."""

    def __init__(self, settings: RunSettings) -> None:
        """Prepares; nothing is changed until `start`."""
        self._settings = settings
        self._arguments: dict[str, dict[str, object]] = {}
        self._recomputed = ""

    def start(self) -> None:
        """Makes the changes, also in modules that are imported later."""
        settings = self._settings
        self._watch_arguments()
        if settings.offload is not None:
            _offload(settings.offload)
        if settings.loads_on_host:
            _load_on_host()
        if settings.defers_state:
            _defer_state()
        if settings.saves_on_host:
            _clone_on_host()
        if settings.parks_state:
            _park_state()
        if settings.checkpointing:
            self._recompute()
        if settings.batch_divisor > 1:
            divide = functools.partial(_divide_batches, settings.batch_divisor)
            ImportWatch({"transformers.training_args": divide}).start()

    def found(self) -> dict[str, object]:
        """Returns what the search for settings needs to know of the script."""
        return {
            "arguments": self._arguments,
            "recomputed": self._recomputed,
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
        parsers: Any = argparse.ArgumentParser
        parse = parsers.parse_known_args

        @functools.wraps(parse)
        def parsed(parser: Any, *args: object, **options: object) -> tuple[Any, list[str]]:
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

        parsers.parse_known_args = parsed

    def _recompute(self) -> None:
        """Makes the outermost module of each forward pass recompute what its blocks keep."""
        seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()

        def before_forward(module: nn.Module, arguments: object) -> None:
            if module in seen:
                return
            seen.update(module.modules())
            self._recomputed = _enable_of_library(module) or _wrap_blocks(module)

        register_module_forward_pre_hook(before_forward)


def _offload(resident: int) -> None:
    """Offloads optimizers before they load a state, or before the first forward pass.

    Not in a step: that goes on as the class has it which the optimizer had before.
    """
    made: weakref.WeakSet[Optimizer] = weakref.WeakSet()
    optimizers: Any = Optimizer
    make, load = optimizers.__init__, optimizers.load_state_dict

    @functools.wraps(make)
    def init(optimizer: Any, *args: object, **options: object) -> None:
        make(optimizer, *args, **options)
        if not isinstance(optimizer, residency.OffloadedOptimizer):
            made.add(optimizer)

    def offload_all() -> None:
        while made:
            optimizer = made.pop()
            if record_of(optimizer) is None:
                residency.offload_optimizer(optimizer, resident=resident)

    @functools.wraps(load)
    def load_state_dict(optimizer: Any, state_dict: Any) -> None:
        if optimizer in made:
            offload_all()
            optimizer.load_state_dict(state_dict)  # of the class that it has now
        else:
            load(optimizer, state_dict)

    def before_forward(module: nn.Module, arguments: object) -> None:
        if made and torch.is_grad_enabled() and not _is_in_step():
            offload_all()

    optimizers.__init__, optimizers.load_state_dict = init, load_state_dict
    register_module_forward_pre_hook(before_forward)
    names = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")
    ImportWatch(dict.fromkeys(names, functools.partial(_add_callback, resident))).start()


def _add_callback(resident: int, module: ModuleType) -> None:
    """Gives trainers of Lightning the callback: their passes are in a step's closure."""
    trainers: Any = vars(module)["Trainer"]
    make = trainers.__init__

    @functools.wraps(make)
    def init(trainer: Any, *args: object, callbacks: Any = None, **options: object) -> None:
        from residency.integrations.lightning import ResidencyCallback

        given = callbacks if isinstance(callbacks, list) else [callbacks] if callbacks else []
        offloading = ResidencyCallback(offload={"resident": resident})
        make(trainer, *args, callbacks=[*given, offloading], **options)

    trainers.__init__ = init


def _is_in_step() -> bool:
    return any(visit.name == "optimizer_step" for visit in open_phases())


def _load_on_host() -> None:
    torch_module: Any = torch
    load = torch_module.load

    @functools.wraps(load)
    def loaded(f: Any, map_location: Any = None, *args: object, **options: object) -> Any:
        if map_location is None or isinstance(map_location, str | torch.device):
            map_location = "cpu"
        return load(f, map_location, *args, **options)

    torch_module.load = loaded
    ImportWatch({"safetensors.torch": _read_on_host}).start()


def _read_on_host(module: ModuleType) -> None:
    read = vars(module)["load_file"]

    @functools.wraps(read)
    def load_file(filename: Any, device: object = "cpu", **options: object) -> Any:
        return read(filename, device="cpu", **options)

    module.__dict__["load_file"] = load_file


def _defer_state() -> None:
    """Keeps what is loaded on the host until the first step, as `Checkpointer.restore` does."""
    optimizers: Any = Optimizer
    place = Optimizer._process_value_according_to_param_policy  # torch asks it where a value goes

    def placed(
        param: Tensor, value: Tensor, param_id: int, param_groups: Any, key: Any = None
    ) -> Tensor:
        if key == "step":
            return place(param, value, param_id, param_groups, key)
        return value.to("cpu", param.dtype if param.is_floating_point() else value.dtype)

    def before_step(optimizer: Optimizer, *_: object) -> None:
        for parameter, values in optimizer.state.items():
            for key, value in values.items() if parameter.is_cuda else ():
                if key != "step" and isinstance(value, Tensor) and value.is_cpu:
                    values[key] = value.to(parameter.device)

    optimizers._process_value_according_to_param_policy = staticmethod(placed)
    register_optimizer_step_pre_hook(before_step)


def _clone_on_host() -> None:
    tensors: Any = Tensor

    def on_host(copy: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(copy)
        def copied(tensor: Tensor, *args: object, **options: object) -> Tensor:
            # What a pass computes with has a graph, and an optimizer's own copies are in its step.
            is_for_save = (
                type(tensor) is Tensor
                and tensor.is_cuda
                and not tensor.requires_grad
                and tensor.nbytes >= _LARGE
                and not _is_in_step()
            )
            return tensor.cpu() if is_for_save else copy(tensor, *args, **options)

        return copied

    tensors.clone = on_host(Tensor.clone)
    tensors.__deepcopy__ = on_host(Tensor.__deepcopy__)


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


def _wrap_blocks(module: nn.Module) -> str:
    """Makes repeated blocks of a module recompute; returns the lists' names."""
    names = []
    for name, blocks in _repeated(module, ""):
        names.append(name or "its blocks")
        _let_recompute(type(blocks[0]))
        for block in blocks:
            block.__dict__[_RECOMPUTES] = True
    return ", ".join(names)


def _let_recompute(kind: Any) -> None:
    """Makes modules of a class recompute that say so: a copy does, too, and none holds itself.

    A function of the module's own would be a cycle, which keeps a deleted model until the garbage
    collector finds it.
    """
    forward = kind.forward
    if getattr(forward, _RECOMPUTES, False):
        return

    @functools.wraps(forward)
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


def _divide_batches(divisor: int, module: ModuleType) -> None:
    arguments: Any = vars(module)["TrainingArguments"]
    check = arguments.__post_init__

    @functools.wraps(check)
    def checked(self: Any) -> None:
        smaller = max(1, self.per_device_train_batch_size // divisor)
        self.gradient_accumulation_steps *= self.per_device_train_batch_size // smaller
        self.per_device_train_batch_size = smaller
        check(self)

    arguments.__post_init__ = checked
