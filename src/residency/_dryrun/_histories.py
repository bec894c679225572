"""The history of L-BFGS, which a dry run would not see fill.

``torch.optim.LBFGS`` keeps two vectors of the parameters' size for each iteration, up to
``history_size``, and ends the iterations of a step by values that a dry run does not compute. Each
step is taken for one of ``max_iter`` iterations: what a card holds at most.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim import LBFGS

from residency._dryrun._methods import Function, put_around

_OF_LINE_SEARCH = 4  # vectors: the parameters before it, and gradients of the bracket


def steps_to_fill(optimizer: object) -> int:
    """Returns in how many steps an optimizer's history is full; 0 for one that keeps none."""
    if not isinstance(optimizer, LBFGS):
        return 0
    group = optimizer.param_groups[0]
    return -(-(int(group["history_size"]) + 1) // max(1, int(group["max_iter"])))


def fill_histories() -> None:
    """Fills the history of L-BFGS after each step, as if all iterations of it had run."""
    calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    @put_around(LBFGS, "step")
    def stepped(step: Function, optimizer: Any, closure: Any) -> Any:
        group = optimizer.param_groups[0]
        # Those of the step itself would come to its end by chance.
        group["max_iter"], iterations = 1, group["max_iter"]
        try:
            found = step(optimizer, closure)
        finally:
            group["max_iter"] = iterations
        calls[optimizer] = calls.get(optimizer, 0) + 1
        _fill(optimizer.state[optimizer._params[0]], group, calls[optimizer])
        return found


def _fill(state: dict[str, Any], group: dict[str, Any], num_calls: int) -> None:
    made, flat = state.get("old_dirs"), state.get("prev_flat_grad")
    if made is None or flat is None:  # it found nothing to do
        return
    wanted = min(group["history_size"], num_calls * group["max_iter"] - 1)
    while len(made) < wanted:
        made.append(torch.empty_like(flat))
        state["old_stps"].append(torch.empty_like(flat))
        state["ro"].append(flat.new_empty(()))
    if group["line_search_fn"] is not None:
        del [torch.empty_like(flat) for _ in range(_OF_LINE_SEARCH)][:]
