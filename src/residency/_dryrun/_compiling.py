"""``torch.compile`` in a dry run: the function itself runs, and the answer has one line about it.

The graph that Dynamo captures is made for a compiler, and is not always the function where none
compiles it: a batch norm that is recomputed in the backward pass counts its batches in place, which
autograd then takes for a change of what it has saved.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch


class Compiling:
    """The calls of ``torch.compile``.

    Attributes:
        is_used: Whether there was one; those that torch itself makes do not count.
    """

    def __init__(self) -> None:
        """Begins with none."""
        self.is_used = False

    def start(self) -> None:
        """Makes what is compiled from now on run eagerly."""
        torch_module: Any = torch
        compile_function = torch_module.compile

        @functools.wraps(compile_function)
        def compiled(*args: Any, **options: Any) -> Any:
            if not self.is_used and not _is_of_torch(sys._getframe(1).f_globals["__name__"]):
                self.is_used = True
                # Not earlier: it imports Dynamo, which takes as long as torch itself.
                torch.compiler.set_stance("force_eager")
            return compile_function(*args, **options)

        torch_module.compile = compiled


def _is_of_torch(module: str) -> bool:
    """Returns whether a module is torch's, and has no call that a script makes through it."""
    return module.partition(".")[0] == "torch" and module != "torch.nn.modules.module"
