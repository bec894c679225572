"""Which parameters a step must not take apart, because what it writes for one it reads for another.

Parameters over the same bytes, one gradient for several parameters, one state under two of them:
the steps of ``torch.optim`` go over a list operation by operation, so the bits of such parameters
depend on which of them are in the list. In one list they are those of the plain step, because what
shares nothing with them has no say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from residency._errors import RefusedError
from residency._optim._homes import Home
from residency._optim._state import ParameterState
from residency._storages import are_apart, sharing
from residency._transfer import local_of

Ties = tuple[tuple[int, ...], ...]


def ties_of(parameters: Sequence[Tensor], states: Sequence[ParameterState | None]) -> Ties:
    """Returns the groups of parameters that belong into one list, as ascending indices.

    Args:
        parameters: Those of a step, each with a gradient.
        states: Of each what may share bytes with another's, or None.
    """
    known = [inner for inner in states if inner is not None]
    inners = {id(inner): inner for inner in known}.values()
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    values = [value for inner in inners for value in _tensors_of(inner)]
    everything = [local_of(tensor) for tensor in (*parameters, *gradients, *values)]
    if len(inners) == len(known) and are_apart(everything):
        return ()  # as nearly always
    owners: list[int] = []
    tensors: list[Tensor] = []
    for index, (parameter, inner) in enumerate(zip(parameters, states, strict=True)):
        found = [parameter, parameter.grad, *_tensors_of(inner)]
        local = [local_of(tensor) for tensor in found if tensor is not None]
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
        yield from (value for value in dict.values(inner) if isinstance(value, Tensor))


def _join(group_of: dict[int, set[int]], members: Iterable[int]) -> None:
    joined = {other for member in members for other in group_of[member]}
    for member in joined:
        group_of[member] = joined


def covers_of(homes: Sequence[Home]) -> dict[Home, Home]:
    """Returns for each home that shares bytes with another the one that holds them all.

    Raises:
        RefusedError: None does.
    """
    covers: dict[Home, Home] = {}
    unique = list(dict.fromkeys(homes))
    if not any(home.is_callers for home in unique):  # those of the library's own lie apart
        return covers
    for group in sharing([home.tensor for home in unique]):
        found = [unique[index] for index in group]
        cover = max(found, key=lambda home: (home.num_bytes, -home.tensor.data_ptr()))
        first, last = cover.tensor.data_ptr(), cover.tensor.data_ptr() + cover.num_bytes
        for home in found:
            start = home.tensor.data_ptr()
            is_inside = first <= start and start + home.num_bytes <= last
            if not is_inside or (start - first) % home.tensor.element_size():
                raise RefusedError(
                    f"a state of shape {tuple(home.tensor.shape)} and one of shape "
                    f"{tuple(cover.tensor.shape)} share a part of their bytes. Nothing was "
                    "stepped: assign a copy of one of them to optimizer.state."
                )
            covers[home] = cover
    return covers
