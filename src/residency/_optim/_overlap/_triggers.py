"""Hooks of torch's that tell how far a training loop is.

An optimizer knows its parameters and not their modules, so a global hook looks at each module that
begins, and knows it by its parameters. At most 64 places of a pass are triggers, each at about as
many bytes of parameters: more would cost a short step more than they give.

Within a compiled or captured forward pass there are none, and in a backward pass the modules that
are computed anew are none: its gradients are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from residency._optim._overlap._schedule import Trigger, TriggerKind

_MOST = 64  # of a pass


class Triggers:
    """The hooks of one optimizer's parameters and of the modules that have them.

    Args:
        tell: Is called at each trigger; what it is bound to is not kept alive.
    """

    def __init__(self, tell: Callable[[Trigger], None]) -> None:
        self._listener = weakref.WeakMethod(tell)
        self._handles: list[RemovableHandle] = []
        self._numbers: dict[int, int] = {}
        self._known: weakref.WeakKeyDictionary[nn.Module, int | None] = weakref.WeakKeyDictionary()
        self._last: Trigger | None = None
        # Not `__del__`: what is collected in a cycle has lost its weak references by then, and a
        # handle finds its hook by one.
        weakref.finalize(self, _take_away, self._handles).atexit = False

    def watch(self, parameters: Sequence[Tensor]) -> None:
        """Looks at these parameters, in group order, and at no others from here on."""
        self.close()
        total = max(sum(each.numel() for each in parameters), 1)
        so_far = 0
        last = -1
        for parameter in parameters:
            number = so_far * _MOST // total
            so_far += parameter.numel()
            self._numbers[id(parameter)] = number
            if number > last and parameter.requires_grad:  # else a gradient from before
                hook = _HookOfGradient(self, Trigger(TriggerKind.BACKWARD, number))
                add: Any = parameter.register_post_accumulate_grad_hook
                self._handles.append(add(hook))
                last = number
        self._handles.append(register_module_forward_pre_hook(_HookOfModule(self)))

    def close(self) -> None:
        """Takes all hooks away."""
        _take_away(self._handles)
        self._numbers.clear()
        self._known.clear()

    def on_module(self, module: nn.Module) -> None:
        """Tells of a module that begins its forward pass."""
        # torch has no public name for the backward pass that a thread is in.
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:
            return
        if module not in self._known:
            own = (each for each in module._parameters.values() if each is not None)
            numbers = (self._numbers[id(each)] for each in own if id(each) in self._numbers)
            self._known[module] = next(numbers, None)
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


def _take_away(handles: list[RemovableHandle]) -> None:
    while handles:
        handles[-1].remove()
        handles.pop()  # last: an interrupt before does it again


class _HookOfModule:
    """A global hook, which keeps nothing alive."""

    def __init__(self, triggers: Triggers) -> None:
        self._triggers = weakref.ref(triggers)

    def __call__(self, module: nn.Module, args: object) -> None:
        if (triggers := self._triggers()) is not None:
            triggers.on_module(module)


class _HookOfGradient:
    """A hook of a parameter, which keeps nothing alive."""

    def __init__(self, triggers: Triggers, trigger: Trigger) -> None:
        self._triggers = weakref.ref(triggers)
        self._trigger = trigger

    def __call__(self, parameter: Tensor) -> None:
        if (triggers := self._triggers()) is not None:
            triggers.on_gradient(self._trigger)
