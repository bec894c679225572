"""The places of a training loop that tell how far it is: modules that begin, gradients that arrive.

An optimizer knows its parameters and not their modules, so calls of all modules are watched, and a
module is known by its parameters. At most 64 places of a pass are triggers, each at about as many
bytes of parameters: more would cost a short step more than they give.

Within a compiled, traced or captured forward pass there are none, and in a backward pass the
modules that are computed anew are none: its gradients are.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from residency._module_calls import Call, watch
from residency._optim._overlap._schedule import Trigger, TriggerKind
from residency._registries import WeakRegistry

_MOST = 64  # of a pass
_lock = threading.RLock()
_watching: WeakRegistry[Triggers] = WeakRegistry()


class Triggers:
    """The watch over one optimizer's parameters and the modules that have them.

    Args:
        tell: Is called at each trigger; what it is bound to is not kept alive.
        numbers: Gives each parameter a number, which a trigger has of the first of its parameters,
            and keeps while others come and go.

    Attributes:
        first: The number of the trigger that a backward pass comes to last.
    """

    def __init__(self, tell: Callable[[Trigger], None], numbers: Iterator[int]) -> None:
        self._listener = weakref.WeakMethod(tell)
        self._new_numbers = numbers
        self._own_numbers: dict[int, int] = {}
        self.first = -1
        self._hooks: list[RemovableHandle] = []
        self._numbers: dict[int, int] = {}
        self._known: weakref.WeakKeyDictionary[nn.Module, int | None] = weakref.WeakKeyDictionary()
        self._last: Trigger | None = None
        # Not `__del__`: what is collected in a cycle has lost its weak references by then, and a
        # handle finds its hook by one.
        weakref.finalize(self, _remove, self._hooks).atexit = False

    def watch(self, parameters: Sequence[Tensor]) -> None:
        """Looks at these parameters, in group order, and at no others from here on."""
        _watching.add(self)
        _remove(self._hooks)
        self._numbers.clear()
        self._known.clear()
        total = max(sum(each.numel() for each in parameters), 1)
        so_far = number = 0
        place = last = -1
        self.first = -1
        for parameter in parameters:
            if so_far * _MOST // total > place:
                place = so_far * _MOST // total
                if id(parameter) not in self._own_numbers:
                    self._own_numbers[id(parameter)] = next(self._new_numbers)
                number = self._own_numbers[id(parameter)]
            so_far += parameter.numel()
            self._numbers[id(parameter)] = number
            if place > last and parameter.requires_grad:  # else a gradient from before
                hook = _HookOfGradient(self, Trigger(TriggerKind.BACKWARD, number))
                add: Any = parameter.register_post_accumulate_grad_hook
                self._hooks.append(add(hook))
                self.first = number if last < 0 else self.first
                last = place

    def close(self) -> None:
        """Ends the watch."""
        _watching.discard(self)
        _remove(self._hooks)
        self._numbers.clear()
        self._known.clear()

    def on_module(self, module: nn.Module) -> None:
        """Tells of a module that begins its forward pass."""
        # torch has no public name for the backward pass that a thread is in.
        if torch._C._current_graph_task_id() != -1 or torch._C._is_tracing():
            return
        if module not in self._known:
            own: dict[str, Any] = getattr(module, "_parameters", {})  # which a half-made one lacks
            numbers = (self._numbers.get(id(each)) for each in own.values())
            self._known[module] = next((n for n in numbers if n is not None), None)
        number = self._known[module]
        if number is not None:
            kind = TriggerKind.FORWARD if torch.is_grad_enabled() else TriggerKind.OTHER
            self._tell(Trigger(kind, number))

    def on_gradient(self, trigger: Trigger) -> None:
        """Tells of a gradient that has arrived."""
        self._tell(trigger)

    def _tell(self, trigger: Trigger) -> None:
        tell = self._listener()
        if tell is None:
            self.close()
        elif trigger != self._last or trigger.kind == TriggerKind.BACKWARD:
            self._last = trigger
            tell(trigger)


def _remove(hooks: list[RemovableHandle]) -> None:
    while hooks:
        hooks[-1].remove()
        hooks.pop()  # last: an interrupt before does it again
    _watch_calls()


def _watch_calls() -> None:
    """Watches calls of modules while any optimizer is to hear of them."""
    with _lock:
        watch(_around, is_on=bool(len(_watching)))


def _around(call: Call, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    for triggers in _watching:
        triggers.on_module(module)
    return call(module, *args, **kwargs)


class _HookOfGradient:
    """A hook of a parameter, which keeps nothing alive."""

    def __init__(self, triggers: Triggers, trigger: Trigger) -> None:
        self._triggers = weakref.ref(triggers)
        self._trigger = trigger

    def __call__(self, parameter: Tensor) -> None:
        if (triggers := self._triggers()) is not None:
            triggers.on_gradient(self._trigger)
