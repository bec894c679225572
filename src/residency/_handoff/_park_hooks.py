"""What tells a user of parked tensors what to call.

A forward that fails gets a note on its own error; a step of an optimizer, which could go half way,
and a forward of an FSDP2 module, which would gather from the host, are refused before they begin.
Everything else runs into torch's own device error.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from residency._errors import RefusedError
from residency._transfer import local_of

_standing: weakref.WeakSet[Notices] = weakref.WeakSet()


class Notices:
    """Are the hooks of one parking.

    Args:
        parked: What is parked, by the tensors' ids; read whenever a hook runs.
    """

    def __init__(self, parked: Mapping[int, object]) -> None:
        self._parked = parked
        self._handles: dict[int, list[RemovableHandle]] = {}
        self._optimizer: weakref.ref[Optimizer] | None = None

    def put_up(self, owner: nn.Module | Optimizer) -> None:
        """Watches the uses of what is parked now."""
        if not self._parked:
            return
        _standing.add(self)
        _watch_steps()
        if isinstance(owner, Optimizer):
            self._optimizer = weakref.ref(owner)
            return
        for part in owner.modules():
            if id(part) not in self._handles and any(map(self.is_parked, _tensors_in(part))):
                handles = [part.register_forward_hook(_explain, always_call=True)]
                self._handles[id(part)] = handles
            if _is_fsdp(part) and ~id(part) not in self._handles:
                handle = part.register_forward_pre_hook(_refuse, prepend=True)
                self._handles[~id(part)] = [handle]

    def take_down(self) -> None:
        """Removes every hook."""
        _standing.discard(self)
        for handles in self._handles.values():
            for handle in handles:
                handle.remove()
        self._handles.clear()
        self._optimizer = None

    def is_parked(self, tensor: Tensor) -> bool:
        """Says whether this parking has the tensor's bytes."""
        return id(local_of(tensor)) in self._parked

    def has_state_of(self, optimizer: Optimizer) -> bool:
        """Says whether this parking has state of the optimizer."""
        return self._optimizer is not None and self._optimizer() is optimizer


def is_parked(tensor: Tensor) -> bool:
    """Says whether a parking has the tensor's bytes."""
    return tensor.is_cpu and any(notices.is_parked(tensor) for notices in _standing)


def _is_fsdp(module: nn.Module) -> bool:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _tensors_in(module: nn.Module) -> Iterator[Tensor]:
    for table in (module._parameters, module._buffers):
        yield from (tensor for tensor in table.values() if tensor is not None)


def _names_parked(module: nn.Module) -> list[str]:
    tables = (module._parameters, module._buffers)
    named = [(n, t) for table in tables for n, t in table.items() if t is not None]
    return [n for n, t in named if any(notices.is_parked(t) for notices in _standing)]


def _explain(module: nn.Module, args: Any, output: Any) -> None:
    """Is the forward hook, which torch calls after a failure too."""
    error = sys.exc_info()[1]
    if not isinstance(error, RuntimeError):
        return
    names = _names_parked(module)
    if names and local_notes(error) == 0:
        error.add_note(
            f"{', '.join(names)} of this {type(module).__name__} is parked on the host: call "
            "residency.unpark(module) with the module that was parked."
        )


def local_notes(error: BaseException) -> int:
    """Returns how many of our notes an error has."""
    return sum("residency.unpark" in note for note in getattr(error, "__notes__", ()))


def _refuse(module: nn.Module, args: Any) -> None:
    names = [n for n, p in module.named_parameters() if any(s.is_parked(p) for s in _standing)]
    if names:
        raise RefusedError(
            f"{', '.join(names[:3])}{' and more' * (len(names) > 3)} of this "
            f"{type(module).__name__} is parked on the host, from where FSDP would gather it: "
            "call residency.unpark(module) with the module that was parked."
        )


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not _standing:
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
