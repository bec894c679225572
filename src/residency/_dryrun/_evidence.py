"""What a run has brought to its end, from its begin on, and after its last error for memory.

A verdict (``_verdict``) rests on nothing else: an error that a script catches, or a library for it,
leaves no other trace. What is counted has ended without an error.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook

from residency._dryrun._caught import caught
from residency._dryrun._methods import around
from residency._dryrun._places import is_script
from residency._dryrun._resumes import TEMPLATE
from residency._dryrun._verdict import BACKWARD, BEGUN, FORWARD, SAVES, STEPS
from residency._memory import open_phases

# Passes with gradients that were begun are counted, too: a training was meant.
_COUNTED = (STEPS, BACKWARD, FORWARD, BEGUN, SAVES)
_MOST_SIGNALS = 1 << 16  # as many as a pipe has room for
_DEEPEST = 4  # of the lists and dicts that a module returns
_OF_USER = (signal.SIGINT, signal.SIGTERM)  # which ask a process to end
_thread = threading.local()  # the module whose forward pass is the outermost one


class Evidence:
    """The counts of a process."""

    def __init__(
        self,
        phase: Callable[[], str],
        saves: Callable[[], int],
        on_free_pass: Callable[[], None],
    ) -> None:
        """Begins at 0.

        Args:
            phase: Returns the name of the phase of now.
            saves: Returns how many files were saved so far.
            on_free_pass: Is called where a forward pass without gradients has come to its end.
        """
        self._on_free_pass = on_free_pass
        self._phase = phase
        self._saves = saves
        self._counts = dict.fromkeys(_COUNTED, 0)
        self._at_error: dict[str, int] | None = None
        self._phase_of_error = ""
        self._pipe: tuple[int, int] | None = None  # of the numbers of signals
        self._signals: set[int] = set()

    def start(self) -> None:
        """Counts from now on."""
        register_optimizer_step_post_hook(self._after_step)
        register_module_forward_pre_hook(self._before_forward)
        register_module_forward_hook(self._after_forward, always_call=True)
        _note_suppressed()
        if threading.current_thread() is threading.main_thread():
            self._hear_signals()

    def begin_anew(self) -> None:
        """Begins at 0 in a forked child, in which nothing has been done yet."""
        self._counts = dict.fromkeys(_COUNTED, 0)
        self._at_error = None
        self._signals.clear()
        if self._pipe is not None:  # the parent's
            for end in self._pipe:
                os.close(end)
            self._hear_signals()

    def note_backward(self) -> None:
        """Counts a backward pass that has come to its end."""
        self._counts[BACKWARD] += 1

    def note_out_of_memory(self) -> None:
        """Counts anew what comes after an error."""
        self._at_error = self._now()
        self._phase_of_error = self._phase()

    def found(self) -> dict[str, object]:
        """Returns the counts, and those since the last error, where there was one."""
        now, before = self._now(), self._at_error
        since = None if before is None else {name: now[name] - before[name] for name in now}
        return {
            "seen": now,
            "since_error": since,
            "phase_of_error": self._phase_of_error,
            "signals": self._heard(),
        }

    def _now(self) -> dict[str, int]:
        return self._counts | {SAVES: self._saves()}

    def _after_step(self, optimizer: object, args: object, options: object) -> None:
        if not any(visit.name == TEMPLATE for visit in open_phases()):
            self._counts[STEPS] += 1

    def _before_forward(self, module: object, arguments: object) -> None:
        if getattr(_thread, "outermost", None) is not None or self._phase().endswith("backward"):
            return
        _thread.outermost = id(module)
        self._counts[BEGUN] += torch.is_grad_enabled()

    def _after_forward(self, module: torch.nn.Module, arguments: object, result: object) -> None:
        """Counts the outermost pass, if it has a result: it has none where it has failed."""
        if getattr(_thread, "outermost", None) != id(module):
            return
        _thread.outermost = None
        if result is not None and _is_on_device(module, result):
            self._counts[FORWARD] += 1
            if not torch.is_grad_enabled():
                self._on_free_pass()

    # ------------------------------------------------------------------------------------- signals

    def _hear_signals(self) -> None:
        """Makes Python write the number of each signal that it gets to a pipe, whatever comes of
        it: a script may catch what Ctrl-C raises.
        """
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)

    def _heard(self) -> list[str]:
        """Returns the names of the signals so far that ask a process to end."""
        if self._pipe is not None:
            with contextlib.suppress(BlockingIOError):
                self._signals.update(os.read(self._pipe[0], _MOST_SIGNALS))
        return [each.name for each in _OF_USER if each in self._signals]


def _note_suppressed() -> None:
    """Notes the errors that the script's ``contextlib.suppress`` drops, as it has no ``except``."""
    kind: Any = contextlib.suppress
    leave = kind.__exit__

    @around(leave)
    def left(self: object, exctype: object, excinst: object, exctb: object) -> bool:
        is_dropped: bool = leave(self, exctype, excinst, exctb)
        if is_dropped and is_script(sys._getframe(1).f_code.co_filename):
            caught.caught()
        return is_dropped

    kind.__exit__ = left


def _is_on_device(module: torch.nn.Module, result: object) -> bool:
    first = next(module.parameters(), None)
    return (first is not None and first.is_cuda) or _has_device_tensor(result, 0)


def _has_device_tensor(value: Any, depth: int) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_cuda
    if depth == _DEEPEST:
        return False
    inner: Iterable[object] = ()
    if isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list | tuple):
        inner = value
    elif hasattr(value, "__dict__"):
        inner = vars(value).values()
    return any(_has_device_tensor(each, depth + 1) for each in inner)
