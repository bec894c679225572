"""The passes of a training loop, forward and backward, as phases: no library names them.

A forward pass begins with the first call of a module with gradients enabled, and ends where the
next phase begins, such as the backward pass: the loss belongs to it. Whatever modules it calls, one
after the other or inside each other, it is one visit, so that a step has two boundaries for it. A
call of a module costs two looks at flags of torch's.

One forward pass at a time is known in a process: the threads that it starts are in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from residency._memory._phase import Visit, begin_phase, boundaries, end_phase, open_phases, phase

FORWARD, BACKWARD = "forward", "backward"
# Of these a pass is a part: evaluation with gradients enabled, recomputed activations.
_WHOLE = frozenset({FORWARD, BACKWARD, "save", "load", "evaluate", "generate"})


class Passes:
    """The forward and backward passes of the process, while `start` has put functions in place."""

    def __init__(self, put: Callable[[object, str, object, object], None]) -> None:
        """Takes the function that puts one in the place of another, and takes it back later."""
        self._put = put
        self._is_on = False
        self._forward: Visit | None = None  # the last one

    def start(self) -> None:
        """Puts the functions in place."""
        self._is_on = True
        call = nn.Module.__call__
        self._put(nn.Module, "__call__", call, self._around_module(call))
        for name in ("backward", "grad"):  # `Tensor.backward` calls the first
            found = vars(torch.autograd)[name]
            self._put(torch.autograd, name, found, self._around_backward(found))

    def stop(self) -> None:
        """Ends a pass that goes on."""
        self._is_on = False
        self.end_forward()

    def end_forward(self) -> None:
        """Ends the forward pass, whichever thread began it."""
        if self._forward is not None:
            boundaries.end(self._forward)
            self._forward = None

    def _around_module(self, found: Callable[..., Any]) -> Callable[..., Any]:
        is_compiling, has_gradients = torch.compiler.is_compiling, torch.is_grad_enabled

        @functools.wraps(found)
        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # Dynamo, which takes the first for true, traces nothing of what comes after it.
            if is_compiling() or not has_gradients():
                return found(module, *args, **kwargs)
            visit = self._forward
            if (visit is not None and not visit.is_over) or not self._is_on or _is_part():
                return found(module, *args, **kwargs)
            owner = object()
            self._forward = begin_phase(FORWARD, owner, is_passing=True)
            try:
                return found(module, *args, **kwargs)
            except BaseException as error:
                if any(visit._owner is owner for visit in open_phases()):
                    end_phase(owner, error)
                raise

        return called

    def _around_backward(self, found: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(found)
        def called(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not self._is_on or _is_part(besides=FORWARD):
                return found(*args, **kwargs)
            self.end_forward()
            with phase(BACKWARD):
                return found(*args, **kwargs)

        return called


def _is_part(*, besides: str | None = None) -> bool:
    """Returns whether what goes on now is part of a phase that is shown as a whole."""
    if any(visit.name in _WHOLE and visit.name != besides for visit in open_phases()):
        return True
    # In autograd's threads, which have no phases of their own, checkpointed activations are
    # recomputed. Torch has no public way to ask whether a thread runs a graph.
    return bool(torch._C._current_graph_task_id() != -1)
