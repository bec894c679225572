"""What tells a user of parked tensors what to call.

A forward that fails gets a note on its own error; a step of an optimizer, which could go half way,
and a forward of an FSDP2 module, which would gather from the host, are refused before they begin.
Everything else runs into torch's own device error.

[Note: no hook in the module] A hook in a module goes along with its copies and pickles, and stays
there. A global hook of torch's has every compiled module warn and compile anew. So calls go, while
anything is parked, through a function in the place of ``nn.Module.__call__``, which no copy takes
along.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from residency._dtensor import local_of
from residency._errors import RefusedError
from residency._park._loads import watch_loads
from residency._registries import WeakRegistry
from residency._transfer import register_away

_MAX_NAMES = 3  # in a message
_lock = threading.RLock()  # reentrant: a parking may die, and say so, wherever Python collects
_standing: WeakRegistry[Notices] = WeakRegistry()
_torch_call = nn.Module.__call__
_is_in_place = False  # whether calls of modules come to `_call`


class Notices:
    """The watch over the uses of what one parking has.

    Args:
        parked: What is parked, by the tensors' ids; read at every use.
    """

    def __init__(self, parked: Mapping[int, object]) -> None:
        self._parked = parked
        self._optimizers: WeakRegistry[Optimizer] = WeakRegistry()
        self._fsdp_parts: WeakRegistry[nn.Module] = WeakRegistry()
        weakref.finalize(self, _watch_calls).atexit = False

    def put_up(self, owners: Iterable[nn.Module | Optimizer]) -> None:
        """Watches the uses of what is parked now."""
        if not self._parked:
            return
        for owner in owners:
            if isinstance(owner, Optimizer):
                self._optimizers.add(owner)
                continue
            for part in filter(_is_fsdp, owner.modules()):
                self._fsdp_parts.add(part)
        _watch_steps()
        _standing.add(self)
        _watch_calls()

    def take_down(self) -> None:
        """Ends the watch."""
        _standing.discard(self)
        _watch_calls()
        self._fsdp_parts.clear()
        self._optimizers.clear()

    def is_parked(self, tensor: Tensor) -> bool:
        """Returns whether this parking has the tensor's bytes."""
        return id(local_of(tensor)) in self._parked

    def has_state_of(self, optimizer: Optimizer) -> bool:
        """Returns whether this parking has state of the optimizer."""
        return optimizer in self._optimizers

    def refuses(self, module: nn.Module) -> bool:
        """Returns whether a forward of the module would gather what is parked."""
        return module in self._fsdp_parts


def is_parked(tensor: Tensor) -> bool:
    """Returns whether a parking has the tensor's bytes."""
    return tensor.is_cpu and any(notices.is_parked(tensor) for notices in _standing)


register_away(is_parked, is_any=lambda: bool(len(_standing)))


def _watch_calls() -> None:
    """Puts our function in the place of torch's while anything is parked, and takes it away after.

    Where another one was put around ours meanwhile, ours stays, and is there the next time.
    """
    global _torch_call, _is_in_place
    with _lock:
        watch_loads(is_on=bool(len(_standing)))
        now: Any = nn.Module.__call__
        if len(_standing):
            if now is not _call and (not _is_in_place or now is _torch_call):
                _torch_call, _is_in_place = now, True
                _set_call(_call)
        elif _is_in_place and now in (_call, _torch_call):
            _is_in_place = False
            _set_call(_torch_call)


def _set_call(function: Any) -> None:
    nn.Module.__call__ = function  # type: ignore[method-assign]  # [Note: no hook in the module]
    # What torch.compile takes for torch's own, so that it may leave the call out: where it was
    # imported while ours stood there, that is ours.
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    if getattr(dynamo, "unpatched_nn_module_call", None) is _call:
        dynamo.unpatched_nn_module_call = _torch_call


def _call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Calls a module as torch does; a use of what is parked is refused, or its error explained."""
    if torch.compiler.is_compiling():
        return _torch_call(self, *args, **kwargs)
    if any(notices.refuses(self) for notices in _standing):
        _refuse(self)
    try:
        return _torch_call(self, *args, **kwargs)
    except RuntimeError as error:
        _explain(self, error)
        raise


def _is_fsdp(module: nn.Module) -> bool:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _explain(module: nn.Module, error: RuntimeError) -> None:
    """Notes on an error which tensors of the module's own are parked; once, at the innermost."""
    tables = (module._parameters, module._buffers)
    named = [(name, t) for table in tables for name, t in table.items() if t is not None]
    names = [name for name, tensor in named if is_parked(local_of(tensor))]
    noted = any("residency.unpark" in note for note in getattr(error, "__notes__", ()))
    if names and not noted:
        error.add_note(
            f"{', '.join(names)} of this {type(module).__name__} is parked on the host: call "
            "residency.unpark(module) with the module that was parked."
        )


def _refuse(module: nn.Module) -> None:
    names = [name for name, p in module.named_parameters() if is_parked(local_of(p))]
    if names:
        raise RefusedError(
            f"{', '.join(names[:_MAX_NAMES])}{' and more' * (len(names) > _MAX_NAMES)} of this "
            f"{type(module).__name__} is parked on the host, from where FSDP would gather it: "
            "call residency.unpark(module) with the module that was parked."
        )


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    if not len(_standing):
        return
    if any(notices.has_state_of(optimizer) for notices in _standing):
        raise RefusedError(
            f"the state of this {type(optimizer).__name__} is parked on the host: call "
            "residency.unpark(optimizer). Nothing was stepped."
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    used = [p for p in parameters if p.grad is not None]
    num_parked = sum(is_parked(local_of(p)) or is_parked(local_of(p.grad)) for p in used)
    if num_parked:
        raise RefusedError(
            f"{num_parked} parameters of this {type(optimizer).__name__} are parked on the host: "
            "call residency.unpark(module) with the module that was parked. Nothing was stepped."
        )
