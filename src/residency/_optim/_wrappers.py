"""Reaches the optimizer inside accelerate's wrapper, and renews what the wrapper captured of it.

Accelerate is not imported: where its module was never loaded, it has wrapped nothing. Invariant,
which ``tests/optim/stacks/test_accelerate.py`` tries to break: a swap that is refused leaves the
wrapper and the optimizer inside as they were.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from torch.optim import Optimizer

from residency._errors import RefusedError
from residency._optim._step_patch import patch_for_scheduler
from residency._optim._validate import check_optimizer

_Swap = TypeVar("_Swap", bound=Callable[..., Any])

# What accelerate 1.x keeps of the optimizer's `step` when there is a GradScaler. Around each scaled
# step it puts the second onto the optimizer, and the first afterwards.
_ORIGINAL = "_optimizer_original_step_method"
_PATCHED = "_optimizer_patched_step_method"


def reaching_inside(swap: _Swap) -> _Swap:
    """Makes a function that gives an optimizer another class take accelerate's wrapper, too.

    What is neither is refused.
    """

    @functools.wraps(swap)
    def reach(optimizer: Any, **settings: Any) -> Any:
        accelerate: Any = sys.modules.get("accelerate.optimizer")
        if accelerate is None or not isinstance(optimizer, accelerate.AcceleratedOptimizer):
            check_optimizer(optimizer, caller=swap.__name__)
            return swap(optimizer, **settings)
        with _unwrapped(optimizer, accelerate.patch_optimizer_step) as inner:
            swap(inner, **settings)
        return optimizer

    return cast(_Swap, reach)


@contextlib.contextmanager
def _unwrapped(wrapper: Any, patch_step: Callable[..., Any]) -> Iterator[Optimizer]:
    """Lends the optimizer inside, then renews what the wrapper had captured of its old class."""
    inner: Any = wrapper.optimizer
    if not isinstance(inner, Optimizer):
        raise RefusedError(
            f"this {type(wrapper).__name__} holds a {type(inner).__name__}, which is not a "
            "torch.optim.Optimizer and keeps its state in its own way. Nothing was changed; "
            "offload the torch.optim.Optimizer that does the steps, if there is one."
        )
    patch = inner.__dict__.get("step")
    captured = [wrapper.__dict__.get(name) for name in (_ORIGINAL, _PATCHED)]
    if patch is not None and any(patch is each for each in captured):
        del inner.__dict__["step"]
        if getattr(captured[0], "_wrapped_by_lr_sched", False):
            patch_for_scheduler(inner)
    try:
        yield inner
    except BaseException:
        if patch is not None:
            inner.__dict__["step"] = patch
        raise
    if wrapper.scaler is not None:
        setattr(wrapper, _ORIGINAL, inner.step)
        setattr(wrapper, _PATCHED, patch_step(wrapper, inner.step))
