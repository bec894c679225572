"""``torch.compile`` in a dry run: the function itself runs, and the answer has one line about it.

The graph that Dynamo captures is made for a compiler, and is not always the function where none
compiles it: a batch norm that is recomputed in the backward pass counts its batches in place, which
autograd then takes for a change of what it has saved.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch

from residency._dryrun._methods import Function, around, put_around
from residency._dryrun._places import is_script
from residency._memory import ImportWatch

# Graphs of these run operation by operation, on a GPU, too.
_FUSE_NOTHING = ("eager", "aot_eager", "aot_eager_decomp_partition", "cudagraphs")


class Compiling:
    """The calls of ``torch.compile``, and of what it gave.

    Attributes:
        is_used: Whether there was one. Those that torch itself makes do not count, and those of a
            library that is being imported only once what they gave is called.
    """

    def __init__(self) -> None:
        """Begins with none."""
        self.is_used = False
        self._is_eager = False
        self._of_thread = threading.local()

    @property
    def is_inside(self) -> bool:
        """Whether this thread runs a function that a compiler would have fused."""
        depth: int = vars(self._of_thread).get("depth", 0)
        return depth > 0

    def start(self) -> None:
        """Makes what is compiled from now on run eagerly."""
        torch_module: Any = torch
        compile_function = torch_module.compile

        @around(compile_function)
        def compiled(model: Any = None, **options: Any) -> Any:
            caller = _caller(sys._getframe(1))
            if model is None:
                return compile_function(**options)  # a decorator, which comes here again
            if _is_of_torch(caller):
                return self._unnoted(compile_function)(model, **options)
            make = functools.partial(self._make, compile_function, model, **options)
            is_of_import = _is_of_import(caller)
            if is_of_import and isinstance(model, FunctionType):
                return _at_first_call(model, make)
            made = make()
            self.is_used |= not is_of_import
            return made

        torch_module.compile = compiled
        watched: dict[str, Callable[[ModuleType], None]] = {
            "torch._dynamo.eval_frame": self._watch_contexts,
            "torch.utils.checkpoint": self._watch_checkpoints,
        }
        ImportWatch(watched).start()

    def _make(self, compile_function: Callable[..., object], model: Any, **options: Any) -> Any:
        if not self._is_eager:
            # Not earlier: it imports Dynamo, which takes as long as torch itself.
            torch.compiler.set_stance("force_eager")
            self._is_eager = True
        if options.get("backend") in _FUSE_NOTHING:
            compile_function = self._unnoted(compile_function)
        return compile_function(model, **options)

    def _watch_contexts(self, module: ModuleType) -> None:
        """Notes the calls of what is compiled: its contexts have hooks for that alone."""

        @put_around(module.OptimizeContext, "__init__")
        def made(make: Function, this: Any, *args: object, **options: object) -> None:
            make(this, *args, **options)
            if not vars(self._of_thread).get("is_unnoted"):
                this.enter_exit_hooks.append(self._enter)

    def _watch_checkpoints(self, module: ModuleType) -> None:
        """Counts what a backward pass recomputes as compiled where its first run was."""

        @put_around(module, "checkpoint")
        def checkpointed(checkpoint: Function, function: Any, *args: Any, **options: Any) -> Any:
            kept = self._within(function) if self.is_inside else function
            return checkpoint(kept, *args, **options)

    def _enter(self) -> Callable[[], None]:
        self.is_used = True
        return self._deepen()

    def _deepen(self) -> Callable[[], None]:
        """Goes one function in, until what it returns is called."""
        own = vars(self._of_thread)
        before = own.get("depth", 0)
        own["depth"] = before + 1
        return lambda: own.update(depth=before)

    def _within(self, function: Callable[..., object]) -> Callable[..., object]:
        @around(function)
        def called(*args: object, **options: object) -> object:
            leave = self._deepen()
            try:
                return function(*args, **options)
            finally:
                leave()

        return called

    def _unnoted(self, make: Callable[..., object]) -> Callable[..., object]:
        """Returns a function whose compiled ones run on a GPU operation by operation, too."""

        @around(make)
        def made(*args: object, **options: object) -> object:
            own = vars(self._of_thread)
            before = own.get("is_unnoted", False)
            own["is_unnoted"] = True
            try:
                return make(*args, **options)
            finally:
                own["is_unnoted"] = before

        return made


def _at_first_call(
    function: Callable[..., object], make: Callable[[], Callable[..., object]]
) -> Callable[..., object]:
    """Returns a function that is compiled when it is called: that imports Dynamo and Inductor,
    which a script that imports a library may never need.
    """
    once = functools.cache(make)

    @around(function)
    def called(*args: object, **options: object) -> object:
        return once()(*args, **options)

    return called


def _caller(frame: FrameType | None) -> FrameType | None:
    """Returns the frame of a call, past the decorator that ``torch.compile`` itself is."""
    while frame is not None and frame.f_globals["__name__"] == "torch":
        frame = frame.f_back
    return frame


def _is_of_import(frame: FrameType | None) -> bool:
    """Returns whether a library makes a call while it is imported."""
    if frame is None or is_script(frame.f_code.co_filename):
        return False
    while frame is not None and not is_script(frame.f_code.co_filename):
        if frame.f_globals.get("__name__") == "importlib._bootstrap":
            return True
        frame = frame.f_back
    return False


def _is_of_torch(frame: FrameType | None) -> bool:
    """Returns whether a call is torch's own, and none that a script makes through a module."""
    module = frame.f_globals["__name__"] if frame is not None else ""
    return module.partition(".")[0] == "torch" and module != "torch.nn.modules.module"
