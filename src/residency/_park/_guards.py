"""What tells a user of parked tensors what to call.

A forward that fails gets a note on its own error; a step of an optimizer, which could go half way,
and a forward of an FSDP2 module, which would gather from the host, are refused before they begin.
Everything else runs into torch's own device error.

Calls go through ``_module_calls`` meanwhile. [Note: no hook in the module]
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from residency._dtensor import local_of
from residency._errors import RefusedError
from residency._module_calls import Call, watch
from residency._park._loads import watch_loads
from residency._registries import WeakRegistry
from residency._transfer import register_away

_MAX_NAMES = 3  # in a message
_lock = threading.RLock()  # reentrant: a parking may die, and say so, wherever Python collects
_standing: WeakRegistry[Notices] = WeakRegistry()


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

    def has_parked(self, local: Tensor) -> bool:
        """Returns whether this parking has the bytes of a plain tensor."""
        return id(local) in self._parked

    def has_state_of(self, optimizer: Optimizer) -> bool:
        """Returns whether this parking has state of the optimizer."""
        return optimizer in self._optimizers

    def refuses(self, module: nn.Module) -> bool:
        """Returns whether a forward of the module would gather what is parked."""
        return module in self._fsdp_parts


def is_parked(tensor: Tensor) -> bool:
    """Returns whether a parking has the tensor's bytes."""
    local = local_of(tensor)
    return local.is_cpu and any(notices.has_parked(local) for notices in _standing)


register_away(is_parked, is_any=lambda: bool(len(_standing)))


def _watch_calls() -> None:
    """Watches calls of modules and loads of optimizers while anything is parked."""
    with _lock:
        is_on = bool(len(_standing))
        watch_loads(is_on=is_on)
        watch(_around, is_on=is_on)


def _around(call: Call, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Calls a module; a use of what is parked is refused, or its error explained."""
    if any(notices.refuses(module) for notices in _standing):
        _refuse(module)
    try:
        return call(module, *args, **kwargs)
    except RuntimeError as error:
        _explain(module, error)
        raise


def _is_fsdp(module: nn.Module) -> bool:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _explain(module: nn.Module, error: RuntimeError) -> None:
    """Notes on an error which tensors of the module's own are parked; once, at the innermost."""
    tables = (module._parameters, module._buffers)
    named = [(name, t) for table in tables for name, t in table.items() if t is not None]
    names = [name for name, tensor in named if is_parked(tensor)]
    noted = any("residency.unpark" in note for note in getattr(error, "__notes__", ()))
    if names and not noted:
        error.add_note(
            f"{', '.join(names)} of this {type(module).__name__} is parked on the host: call "
            "residency.unpark(module) with the module that was parked."
        )


def _refuse(module: nn.Module) -> None:
    names = [name for name, p in module.named_parameters() if is_parked(p)]
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
    num_parked = sum(is_parked(p) or is_parked(p.grad) for p in used)
    if num_parked:
        raise RefusedError(
            f"{num_parked} parameters of this {type(optimizer).__name__} are parked on the host: "
            "call residency.unpark(module) with the module that was parked. Nothing was stepped."
        )
