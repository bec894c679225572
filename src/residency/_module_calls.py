"""A function in the place of ``nn.Module.__call__``, for as long as anything is to hear of calls.

[Note: no hook in the module] A hook in a module goes along with its copies and pickles, and stays
there. A global hook of torch's has every compiled module warn and compile anew, and none of torch's
hooks hears of an interrupt in a forward pass. So calls go, while a watch stands, through a function
that no copy takes along.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

Call = Callable[..., Any]
Around = Callable[..., Any]  # takes the call that it is around, the module, and the arguments

_lock = threading.RLock()  # reentrant: a watch may end wherever Python collects
_watches: list[Around] = []
_torch_call: Call = nn.Module.__call__
_chain: Call = _torch_call
_is_in_place = False  # whether calls of modules come to `_call`


def watch(around: Around, *, is_on: bool) -> None:
    """Puts a function around each call of a module that is not compiled, or takes it away.

    Where another one was put around ours meanwhile, ours stays, and is there the next time.

    Args:
        around: Is called with the call, the module and the arguments, and calls the first with the
            others. One that stands already stays.
        is_on: Whether it is to stand.
    """
    global _torch_call, _is_in_place, _chain
    with _lock:
        others = [each for each in _watches if each is not around]
        _watches[:] = [*others, around] if is_on else others
        now: Any = nn.Module.__call__
        if _watches:
            if now is not _call and (not _is_in_place or now is _torch_call):
                _torch_call, _is_in_place = now, True
                _set_call(_call)
        elif _is_in_place and now in (_call, _torch_call):
            _is_in_place = False
            _set_call(_torch_call)
        chain = _torch_call
        for each in _watches:
            chain = partial(each, chain)
        _chain = chain


def _set_call(function: Any) -> None:
    nn.Module.__call__ = function  # type: ignore[method-assign]  # [Note: no hook in the module]
    # What torch.compile takes for torch's own, so that it may leave the call out: where it was
    # imported while ours stood there, that is ours.
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    if getattr(dynamo, "unpatched_nn_module_call", None) is _call:
        dynamo.unpatched_nn_module_call = _torch_call


def _call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Calls a module as torch does, with the watches around."""
    if torch.compiler.is_compiling():
        return _torch_call(self, *args, **kwargs)
    return _chain(self, *args, **kwargs)
