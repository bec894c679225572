"""The watch over the uses of streamed models: calls of units, and moves of whole models.

[Note: no hook in the module] Nothing stands in the modules themselves, so that copies and pickles
of a streamed model are those of a plain one whose frozen parameters are on the host.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor, nn

from residency._errors import RefusedError
from residency._frozen._homes import FrozenUnit
from residency._frozen._passes import UnitPasses
from residency._module_calls import Call, watch

_lock = threading.RLock()
_units: weakref.WeakKeyDictionary[nn.Module, tuple[FrozenUnit, UnitPasses]] = (
    weakref.WeakKeyDictionary()
)
_torch_apply: Any = nn.Module._apply


def begin(units: list[FrozenUnit], passes: UnitPasses) -> None:
    """Hears of the uses of units from here on."""
    with _lock:
        for unit in units:
            module = unit.module()
            assert module is not None, "the caller has the model"
            _units[module] = (unit, passes)
        # A model that dies while it streams takes the units along.
        weakref.finalize(passes, _watch).atexit = False
    _watch()


def end(units: list[FrozenUnit]) -> None:
    """Hears of their uses no more."""
    with _lock:
        for unit in units:
            module = unit.module()
            if module is not None:
                _units.pop(module, None)
    _watch()


def streamed_in(model: nn.Module) -> list[FrozenUnit]:
    """Returns the units of whatever stream that have parameters of a model, or of a part of one."""
    if not len(_units):
        return []
    own = set(map(id, model.parameters()))
    units = [unit for unit, _ in list(_units.values())]
    return [unit for unit in units if any(id(entry.parameter) in own for entry in unit.entries)]


def _watch() -> None:
    """Stands in the calls and moves of modules while there are units, and leaves after."""
    global _torch_apply
    with _lock:
        is_on = bool(len(_units))
        watch(_around, is_on=is_on)
        kind: Any = nn.Module
        if is_on and kind._apply is not _apply:
            _torch_apply = kind._apply
            kind._apply = _apply
        elif not is_on and kind._apply is _apply:
            kind._apply = _torch_apply


def _around(call: Call, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Calls a module; of a unit, with its bytes on the device."""
    found = _units.get(module)
    if found is None:
        return call(module, *args, **kwargs)
    unit, passes = found
    return passes.call(unit, call, module, args, kwargs)


def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """Does what torch does for ``to``, ``cuda``, ``half`` and the like: streamed parameters stay at
    home where the rest goes to their device, and any other change is refused.
    """
    if isinstance(fn, _Unless):  # of a module around this one
        return _torch_apply(self, fn, recurse)
    units = streamed_in(self)
    streamed = {id(entry.parameter): entry for unit in units for entry in unit.entries}
    for model in {(e.here.dtype, e.here.device): e for e in streamed.values()}.values():
        made = fn(torch.empty(0, dtype=model.here.dtype, device=model.here.device))
        if (made.device, made.dtype) != (model.here.device, model.here.dtype):
            raise RefusedError(
                f"{len(streamed)} frozen parameters of this {type(self).__name__}, "
                f"{units[0].name}.{units[0].entries[0].path} among them, stream from the host to "
                f"{model.here.device}, and were to become {made.dtype} on {made.device}. Nothing "
                "moved; call stream.stop() first."
            )
    return _torch_apply(self, _Unless(streamed, fn), recurse)


class _Unless:
    """A move or a cast of all tensors but those that stream."""

    def __init__(self, streamed: Container[int], fn: Callable[[Tensor], Tensor]) -> None:
        self._streamed = streamed
        self._fn = fn

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor if id(tensor) in self._streamed else self._fn(tensor)
