"""Modes that a caller has switched on for other tensors, shut out where the library makes its own.

A default device, a dispatch mode, inference mode or an autocast region decides where and how a
tensor is made. Invariant, which ``tests/test_storages.py`` tries to break: memory of the library's
own is made inside ``callers_modes_off``, so that no mode of the caller's reaches it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

# there is no public way (torch 2.11 to 2.13)
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def callers_modes_off() -> Iterator[None]:
    """Shuts the caller's modes out: default device and device contexts, function and dispatch
    modes, inference mode and gradients. What is inside another such block, or call, enters none.

    Name dtype and device of what is made inside: the default dtype is not among them.
    """
    if _are_off():  # to enter all four costs ten times as much, and a call comes here per tensor
        yield
        return
    # `_disable_current_modes` is torch's own way to leave dispatch modes (read in 2.11 and 2.13);
    # a default device is a function mode, which `DisableTorchFunction` turns off.
    with (
        torch._C.DisableTorchFunction(),
        _dispatch_modes_off(),
        torch.inference_mode(mode=False),
        torch.no_grad(),
    ):
        yield


def _are_off() -> bool:
    # there is no public way to ask for function and dispatch modes (torch 2.11 to 2.13)
    return bool(
        torch._C._is_torch_function_all_disabled()
        and not torch.is_grad_enabled()
        and not torch.is_inference_mode_enabled()
        and not _num_dispatch_modes()
    )


def _dispatch_modes_off() -> AbstractContextManager[object]:
    """Leaves the dispatch modes, if there are any.

    Torch's own way imports modules the first time, which a signal handler that comes meanwhile
    would find half made.
    """
    if _num_dispatch_modes():
        modes_off: AbstractContextManager[object] = _disable_current_modes()
        return modes_off
    return nullcontext()


def _num_dispatch_modes() -> int:
    num_before_autograd: Any = _len_torch_dispatch_stack_pre_dispatch
    # there is no public way to count them, either
    return int(torch._C._len_torch_dispatch_stack() + num_before_autograd())


@contextmanager
def inference_mode_off() -> Iterator[None]:
    """Leaves a caller's inference mode, where there is one: a tensor that is made in it cannot be
    written later, outside. Also a decorator, of calls whose results outlive them.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(mode=False), torch.no_grad():
        yield
