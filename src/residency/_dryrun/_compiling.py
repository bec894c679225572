"""``torch.compile`` in a dry run: the function itself runs, and the answer has one line about it.

The graph that Dynamo captures is made for a compiler, and is not always the function where none
compiles it: a batch norm that is recomputed in the backward pass counts its batches in place, which
autograd then takes for a change of what it has saved.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from residency._dryrun._places import is_script


class Compiling:
    """The calls of ``torch.compile``.

    Attributes:
        is_used: Whether there was one. Those that torch itself makes do not count, and those of a
            library that is being imported only once what they gave is called.
        stand_ins: What is called in place of a function that is compiled.
    """

    def __init__(self) -> None:
        """Begins with none."""
        self.is_used = False
        self.stand_ins: dict[object, Callable[..., object]] = {}

    def start(self) -> None:
        """Makes what is compiled from now on run eagerly."""
        torch_module: Any = torch
        compile_function = torch_module.compile

        @functools.wraps(compile_function)
        def compiled(*args: Any, **options: Any) -> Any:
            caller = sys._getframe(1)
            if args and inspect.isfunction(args[0]) and args[0] in self.stand_ins:
                return self._noting(self.stand_ins[args[0]])
            if self.is_used or _is_of_torch(caller.f_globals["__name__"]):
                return compile_function(*args, **options)
            # Not earlier: it imports Dynamo, which takes as long as torch itself.
            torch.compiler.set_stance("force_eager")
            made = compile_function(*args, **options)
            if args and inspect.isfunction(made) and _is_of_import(caller):
                return self._noting(made)
            self.is_used = True
            return made

        torch_module.compile = compiled

    def _noting(self, function: Any) -> Any:
        @functools.wraps(function)
        def called(*args: Any, **options: Any) -> Any:
            self.is_used = True
            return function(*args, **options)

        return called


def _is_of_import(frame: FrameType | None) -> bool:
    """Returns whether a library makes a call while it is imported."""
    if frame is None or is_script(frame.f_code.co_filename):
        return False
    while frame is not None and not is_script(frame.f_code.co_filename):
        if frame.f_globals.get("__name__") == "importlib._bootstrap":
            return True
        frame = frame.f_back
    return False


def _is_of_torch(module: str) -> bool:
    """Returns whether a module is torch's, and has no call that a script makes through it."""
    return module.partition(".")[0] == "torch" and module != "torch.nn.modules.module"
