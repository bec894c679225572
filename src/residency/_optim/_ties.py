"""Which parameters a step must not take apart, because what it writes for one it reads for another.

Parameters over the same bytes, one gradient for several parameters, one state under two of them:
the steps of ``torch.optim`` go over a list operation by operation, so the bits of such parameters
depend on which of them are in the list. In one list they are those of the plain step, because what
shares nothing with them has no say.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

from torch import Tensor

from residency._dtensor import local_of, locals_of
from residency._errors import RefusedError
from residency._optim._homes import Home
from residency._optim._state import ParameterState
from residency._storages import are_apart, bytes_over, is_dense, overlapping, sharing
from residency._transfer import Region, Slab, align_up

Ties = tuple[tuple[int, ...], ...]


def ties_of(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    states: Sequence[ParameterState | None],
) -> Ties:
    """Returns the groups of parameters that belong into one list, as ascending indices.

    Args:
        parameters: Those of a step.
        gradients: The gradient of each.
        states: Of each what may share bytes with another's, or None; empty where nothing may.
    """
    known = [inner for inner in states if inner is not None]
    inners = {id(inner): inner for inner in known}.values()
    values = [value for inner in inners for value in _tensors_of(inner)]
    everything = [*parameters, *gradients, *values]
    if len(inners) == len(known) and are_apart(locals_of(everything)):
        return ()  # as nearly always
    owners: list[int] = []
    tensors: list[Tensor] = []
    of_each = zip_longest(parameters, gradients, states)
    for index, (parameter, gradient, inner) in enumerate(of_each):
        local = locals_of([parameter, gradient, *_tensors_of(inner)])
        tensors += local
        owners += [index] * len(local)
    group_of = {index: {index} for index in range(len(parameters))}
    for group in sharing(tensors):
        _join(group_of, [owners[index] for index in group])
    for inner in inners:
        _join(group_of, [index for index, other in enumerate(states) if other is inner])
    groups = {id(group): tuple(sorted(group)) for group in group_of.values()}
    return tuple(sorted(group for group in groups.values() if len(group) > 1))


def _tensors_of(inner: ParameterState | None) -> Iterator[Tensor]:
    if inner is not None:
        for value in dict.values(inner):
            if isinstance(value, Tensor):
                local = local_of(value)
                # What has gaps moves with what lies in them.
                filled = None if is_dense(local) or not local.numel() else bytes_over([local])
                yield local if filled is None else filled


def _join(group_of: dict[int, set[int]], members: Iterable[int]) -> None:
    joined = {other for member in members for other in group_of[member]}
    for member in joined:
        group_of[member] = joined


def covers_of(homes: Sequence[Home]) -> dict[Home, Home]:
    """Returns for each home that lies in a range with another, or has gaps, one of all the bytes
    from the first to the last of them.

    Raises:
        RefusedError: No storage has all of these bytes.
    """
    covers: dict[Home, Home] = {}
    unique = list(dict.fromkeys(homes))
    if not any(home.is_callers for home in unique):  # those of the library's own lie apart
        return covers
    groups = overlapping([home.tensor for home in unique])
    grouped = {index for group in groups for index in group}
    groups += [
        [index]
        for index, home in enumerate(unique)
        if index not in grouped and not is_dense(home.tensor) and home.tensor.numel()
    ]
    for group in groups:
        found = [unique[index] for index in group]
        whole = bytes_over([home.tensor for home in found])
        sizes = (home.tensor.element_size() for home in found)
        starts = (home.tensor.data_ptr() for home in found)
        if whole is None or any(map(operator.mod, starts, sizes)):
            raise RefusedError(
                f"states of the shapes {[tuple(home.tensor.shape) for home in found]} share a part "
                "of their bytes, and no storage has all of them. Nothing was stepped: assign "
                "copies of them to optimizer.state."
            )
        region = Region(Slab.over(whole), 0, align_up(whole.numel()))
        cover = Home(whole, region, whole, is_callers=True)
        covers.update(dict.fromkeys(found, cover))
    return covers
