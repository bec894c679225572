"""Which parameters a step must not take apart, because what it writes for one it reads for another.

Parameters over the same bytes, one gradient for several parameters: the steps of ``torch.optim`` go
over a list operation by operation, so the bits of such parameters depend on which of them are in
the list. In one list they are those of the plain step, because what shares nothing with them has no
say. States share no bytes: see ``_apart``.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from residency._dtensor import locals_of
from residency._storages import are_apart, sharing

Ties = tuple[tuple[int, ...], ...]


def ties_of(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> Ties:
    """Returns the groups of parameters that belong into one list, as ascending indices.

    Args:
        parameters: Those of a step.
        gradients: The gradient of each.
    """
    tensors = locals_of([*parameters, *gradients])
    if are_apart(tensors):
        return ()  # as nearly always
    group_of = {index: {index} for index in range(len(parameters))}
    for group in sharing(tensors):
        joined = set().union(*(group_of[index % len(parameters)] for index in group))
        for index in joined:
            group_of[index] = joined
    groups = {id(group): tuple(sorted(group)) for group in group_of.values()}
    return tuple(sorted(group for group in groups.values() if len(group) > 1))
