"""Which phase a script is in: known calls of libraries, its own ``residency.phase``, and of the
rest forward and backward passes, which no library names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from residency._dryrun._books import BETWEEN, STEP
from residency._dryrun._methods import Function, put_around
from residency._memory import OPTIMIZER_STEP, KnownCalls, Visit, boundaries

SET_UP, BACKWARD = "set up", "backward"
# Inside these a forward pass is part of the phase: recomputed activations, evaluation.
_WHOLE = frozenset({BACKWARD, "save", "load", "evaluate", "generate"})


class Phases:
    """The phases of the process, of whichever thread.

    Attributes:
        name: The phase of now.
    """

    def __init__(self, on_end: Callable[[str], None], on_backward: Callable[[], None]) -> None:
        """Begins with what comes before the first pass.

        Args:
            on_end: Called with a phase's name when it ends.
            on_backward: Called when a backward pass has come to its end without an error.
        """
        self.name = SET_UP
        self._on_end = on_end
        self._on_backward = on_backward
        self._open: list[str] = []
        self._pass = SET_UP  # what goes on outside known calls
        self._calls = KnownCalls()

    def start(self) -> None:
        """Watches the process from now on."""
        boundaries.watch(self._begin, self._end)
        self._calls.start()
        register_module_forward_pre_hook(self._before_forward)
        for name in ("backward", "grad"):
            put_around(torch.autograd, name)(self._pass_back)

    def finish(self) -> None:
        """Ends the phase of now."""
        self._on_end(self.name)

    def _begin(self, visit: Visit) -> None:
        self._open.append(visit.name)
        self._enter()

    def _end(self, visit: Visit) -> None:
        if visit.name in self._open:
            del self._open[len(self._open) - 1 - self._open[::-1].index(visit.name) :]
        self._pass = ""
        self._enter()

    def _before_forward(self, module: object, arguments: object) -> None:
        if self._open and self._open[-1] in _WHOLE:
            return
        current = "forward" if torch.is_grad_enabled() else "evaluate"
        if current != self._pass:
            self._pass = current
            self._enter()

    def _pass_back(self, function: Function, *args: object, **options: object) -> Any:
        if self._open and self._open[-1] in _WHOLE:
            return function(*args, **options)  # of a recomputed part, or of an optimizer's own
        self._open.append(BACKWARD)
        self._enter()
        try:
            result = function(*args, **options)
            self._on_backward()
            return result
        finally:
            if BACKWARD in self._open:
                self._open.remove(BACKWARD)
            self._pass = ""
            self._enter()

    def _enter(self) -> None:
        parts = list(self._open)
        if self._pass and not (parts and parts[-1] in _WHOLE):
            parts.append(self._pass)
        if OPTIMIZER_STEP in parts[:-1]:  # a closure's passes in it are phases
            parts.remove(OPTIMIZER_STEP)
        name = "/".join(parts).replace(OPTIMIZER_STEP, STEP) or BETWEEN
        if name != self.name:
            ended, self.name = self.name, name  # first, as the script may be left there
            self._on_end(ended)
