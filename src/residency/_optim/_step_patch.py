"""The ``step`` that an LR scheduler of torch puts onto an optimizer, through swaps of its class.

Invariant, which ``tests/optim/test_hooks.py`` tries to break: an optimizer that had such a patch
before a swap has one after it, for its new class.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer, lr_scheduler

from residency._errors import RefusedError


def validate_step_patch(optimizer: Optimizer) -> None:
    """Checks that nothing but an LR scheduler of torch put a ``step`` onto the optimizer itself.

    Raises:
        RefusedError: Something else did.
    """
    patch = optimizer.__dict__.get("step")
    if patch is None or _is_scheduler_patch(patch, type(optimizer)):
        return
    raise RefusedError(
        f"this {type(optimizer).__name__} has a `step` attribute of its own ({patch!r}) that no LR "
        "scheduler of torch made; it would go around the swap. Swap before the optimizer is "
        "wrapped, or pass the result of accelerate's prepare instead of the optimizer inside."
    )


def _is_scheduler_patch(patch: object, owner: type[Optimizer]) -> bool:
    made_by = getattr(patch, "__globals__", None)
    return (
        getattr(patch, "_wrapped_by_lr_sched", False)
        and (made_by is vars(lr_scheduler) or made_by is globals())
        and getattr(patch, "__wrapped__", None) is owner.step
    )


def remake_step_patch(optimizer: Optimizer) -> None:
    """Makes the LR scheduler's patch again: it closes over the step function of the class
    before.
    """
    if optimizer.__dict__.pop("step", None) is not None:
        patch_for_scheduler(optimizer)


def patch_for_scheduler(optimizer: Optimizer) -> None:
    """Puts onto the optimizer the ``step`` that an LR scheduler puts there, for its class now."""
    owner = weakref.ref(optimizer)
    function: Callable[..., Any] = type(optimizer).step

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        found = owner()
        assert found is not None
        found._opt_called = True  # type: ignore[attr-defined]  # as the scheduler's
        return function(found, *args, **kwargs)

    wrapper._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = wrapper  # type: ignore[method-assign]
