"""Hooks of torch's that tell how far a training loop is.

An optimizer knows its parameters and not their modules. So a step that has new parameters looks for
their modules among all objects that the garbage collector knows, which takes some ten milliseconds,
and gives a hook to each. A global hook would see every module, but with one ``torch.compile`` warns
in the whole process. At most 64 places of a pass are triggers, each at about as many bytes of
parameters: more would cost a short step more than they give.

Within a compiled, traced or captured forward pass there are none, and in a backward pass the
modules that are computed anew are none: its gradients are.

[Note: copies of a hook] A module's hooks are copied and saved with it. A copy of ours does nothing,
keeps nothing alive, and a file with one can be read where this library is not installed.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from residency._optim._overlap._schedule import Trigger, TriggerKind

_logger = logging.getLogger("residency")
_MOST = 64  # of a pass


class Triggers:
    """The hooks of one optimizer's parameters and of the modules that have them.

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
        self._of_gradients: list[RemovableHandle] = []
        self._of_modules: list[RemovableHandle] = []
        self._numbers: dict[int, int] = {}
        self._known: weakref.WeakKeyDictionary[nn.Module, int | None] = weakref.WeakKeyDictionary()
        self._sought: set[int] = set()  # whether a module was found or not
        self._last: Trigger | None = None
        # Not `__del__`: what is collected in a cycle has lost its weak references by then, and a
        # handle finds its hook by one.
        weakref.finalize(self, _remove, self._of_gradients).atexit = False
        weakref.finalize(self, _remove, self._of_modules).atexit = False

    def watch(self, parameters: Sequence[Tensor]) -> None:
        """Looks at these parameters, in group order, and at no others from here on."""
        _remove(self._of_gradients)
        self._numbers.clear()
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
                self._of_gradients.append(add(hook))
                self.first = number if last < 0 else self.first
                last = place
        for module in list(self._known):
            self._known[module] = self._number_of(module)

    def find_modules(self) -> None:
        """Gives hooks to the modules of parameters that have not been looked for, if there are any,
        or if a module has died, which may have a successor.
        """
        if len(self._known) < len(self._of_modules):
            self._sought.clear()
        if self._numbers.keys() <= self._sought:
            return
        self._sought |= self._numbers.keys()
        _remove(self._of_modules)
        self._known.clear()
        for module in _modules():
            number = self._number_of(module)
            if number is not None:
                self._known[module] = number
                self._of_modules.append(module.register_forward_pre_hook(_HookOfModule(self)))
        if not self._known:
            _logger.warning(
                "no module has a parameter of this optimizer, so overlap=True changes nothing."
            )

    def close(self) -> None:
        """Takes all hooks away."""
        _remove(self._of_gradients)
        _remove(self._of_modules)
        self._numbers.clear()
        self._sought.clear()
        self._known.clear()

    def on_module(self, module: nn.Module) -> None:
        """Tells of a module that begins its forward pass."""
        # torch has no public name for the backward pass that a thread is in.
        if torch._C._current_graph_task_id() != -1 or torch._C._is_tracing():
            return
        number = self._known.get(module)
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

    def _number_of(self, module: nn.Module) -> int | None:
        numbers = (self._numbers.get(id(each)) for each in module._parameters.values())
        return next((number for number in numbers if number is not None), None)


def _modules() -> list[nn.Module]:
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, nn.Module)}
    return [each for each in objects if type(each) in kinds and "_parameters" in each.__dict__]


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles[-1].remove()
        handles.pop()  # last: an interrupt before does it again


class _HookOfModule:
    """A hook of a module, which keeps nothing alive. [Note: copies of a hook]"""

    def __init__(self, triggers: Triggers) -> None:
        self._triggers = weakref.ref(triggers)

    def __call__(self, module: nn.Module, args: object) -> None:
        if torch.compiler.is_compiling():  # first, for a compiler that looks into this
            return
        if (triggers := self._triggers()) is not None:
            triggers.on_module(module)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, ({}, "get")  # called with a module and its arguments, it returns these


class _HookOfGradient:
    """A hook of a parameter, which keeps nothing alive."""

    def __init__(self, triggers: Triggers, trigger: Trigger) -> None:
        self._triggers = weakref.ref(triggers)
        self._trigger = trigger

    def __call__(self, parameter: Tensor) -> None:
        if (triggers := self._triggers()) is not None:
            triggers.on_gradient(self._trigger)
