"""Which tensors lie on the same bytes, asked of the memory and not of the objects.

Two tensors may share bytes without sharing a storage object (two ``from_numpy`` over one array),
and share a storage without sharing bytes (two columns). Invariant, which ``tests/test_storages.py``
tries to break: the answer follows from device, address, shape and strides alone.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from residency._modes import callers_modes_off


class Span(NamedTuple):
    """The range of bytes from a tensor's first element to its last.

    Attributes:
        device: Where the bytes are.
        first: The address of the first byte.
        last: The address after the last one.
    """

    device: torch.device
    first: int
    last: int


def is_wrapper(tensor: Tensor) -> bool:
    """Returns whether a tensor is of a class that stands before the bytes of others."""
    # Torch annotates the attribute as an operator's method, which it is none of.
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__  # pyright: ignore[reportAttributeAccessIssue]


def span_of(tensor: Tensor) -> Span | None:
    """Returns the range of a plain tensor; None where it has no bytes, or its storage was freed."""
    if tensor.numel() == 0 or not tensor.untyped_storage().nbytes():
        return None
    count = tensor.numel()
    if not tensor.is_contiguous():
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        count = 1 + sum((size - 1) * stride for size, stride in steps)
    # Of the storage: `Tensor.data_ptr` refuses conjugated and negated views.
    first = (
        tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.element_size()
    )
    return Span(tensor.device, first, first + count * tensor.element_size())


def storage_key(tensor: Tensor) -> int:
    """Returns a number that all tensors over one storage have in common, as long as it lives."""
    # The address of torch's own object; an address of bytes is 0 where there are none, and two
    # storages may lie on the same. torch has no public name for it (2.13).
    return int(tensor.untyped_storage()._cdata)


def weak_reference(storage: torch.UntypedStorage) -> StorageWeakRef:
    """Returns a reference that keeps no storage alive."""
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # torch's


def is_gone(reference: StorageWeakRef) -> bool:
    """Returns whether the storage of a weak reference is no more."""
    return bool(reference.expired())  # type: ignore[no-untyped-call]  # torch's


def strided_as(tensor: Tensor) -> tuple[torch.dtype, torch.Size, tuple[int, ...]]:
    """Returns what two tensors over the same bytes have in common if they read them alike."""
    return tensor.dtype, tensor.shape, tensor.stride()


def sharing(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Returns the groups of two or more tensors that share at least one byte, directly or through
    others, as ascending indices into ``tensors``.

    Args:
        tensors: Plain tensors, of any device; the local ones of sharded tensors. The same object
            given twice shares with itself.

    Memory:
        Host: one byte for each byte of a range in which tensors lie among one another with gaps,
        as columns do; else none.
    """
    groups: list[list[int]] = []
    for near in overlapping(tensors):
        spans = {i: span for i in near if (span := span_of(tensors[i])) is not None}
        groups += _sharing_among(near, tensors, spans)
    return sorted(sorted(group) for group in groups)


def overlapping(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Returns the groups of two or more tensors whose ranges overlap, directly or through others,
    in the order of their addresses: those of ``sharing``, and such as lie in the gaps of others.
    """
    if are_apart(tensors):
        return []  # as nearly always
    spans = {i: span for i, tensor in enumerate(tensors) if (span := span_of(tensor)) is not None}
    groups: list[list[int]] = []
    reach: Span | None = None
    for index in sorted(spans, key=lambda i: (str(spans[i].device), spans[i].first)):
        span = spans[index]
        if reach is not None and span.device == reach.device and span.first < reach.last:
            groups[-1].append(index)
            reach = reach._replace(last=max(reach.last, span.last))
        else:
            groups.append([index])
            reach = span
    return [group for group in groups if len(group) > 1]


def laid_over(whole: Tensor, num_bytes: int, like: Tensor) -> Tensor:
    """Returns a tensor with the dtype, shape and strides of ``like`` over other bytes.

    Args:
        whole: ``uint8``, whose storage it gets.
        num_bytes: Where it begins in ``whole``; a multiple of its element size from the beginning
            of the storage.
        like: A plain tensor.
    """
    start = (int(whole.storage_offset()) + num_bytes) // like.element_size()
    with callers_modes_off():
        made = torch.empty(0, dtype=like.dtype, device=whole.device)
        return made.set_(whole.untyped_storage(), start, like.shape, like.stride())


def are_apart(tensors: Sequence[Tensor]) -> bool:
    """Returns whether no two ranges overlap; asked of all parameters at every step, so without an
    object for each. False where addresses alone do not tell, as those of two devices.
    """
    are_contiguous = [tensor.is_contiguous() for tensor in tensors]
    dense = tensors if all(are_contiguous) else list(compress(tensors, are_contiguous))
    try:
        starts = [tensor.data_ptr() for tensor in dense]
    except RuntimeError:  # a conjugated or negated view
        return False
    ends = list(map(operator.add, starts, [tensor.nbytes for tensor in dense]))
    if len(dense) < len(tensors):
        others = [tensor for tensor in tensors if not tensor.is_contiguous()]
        spans = [span for tensor in others if (span := span_of(tensor)) is not None]
        starts += [span.first for span in spans]
        ends += [span.last for span in spans]
    starts.sort()
    ends.sort()
    # Ranges lie apart where each ends before the next one starts.
    return not any(map(operator.gt, ends, starts[1:]))


def overlaps_itself(tensor: Tensor) -> bool:
    """Returns whether two elements of a plain tensor share bytes, as where it is expanded.

    Memory:
        Host: one byte for each byte of its range, where sizes and strides alone do not tell.
    """
    if is_dense(tensor) or (span := span_of(tensor)) is None:
        return False
    if any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
        return True
    reach = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and step <= reach:
            break
        reach += (size - 1) * step
    else:
        return False
    with callers_modes_off():
        taken = _bytes_taken(tensor, span, span.first, span.last - span.first)
    return int(taken.sum()) < tensor.numel() * tensor.element_size()


def _sharing_among(
    near: Sequence[int], tensors: Sequence[Tensor], spans: dict[int, Span]
) -> list[list[int]]:
    """Splits tensors whose ranges overlap into groups that share bytes."""
    if len(near) < 2:
        return []
    if all(is_dense(tensors[index]) for index in near):
        return [list(near)]
    start = min(spans[index].first for index in near)
    length = max(spans[index].last for index in near) - start
    group_of = {index: {index} for index in near}
    with callers_modes_off():
        taken = {index: _bytes_taken(tensors[index], spans[index], start, length) for index in near}
    for position, left in enumerate(near):
        for right in near[position + 1 :]:
            if group_of[left] is not group_of[right] and bool((taken[left] & taken[right]).any()):
                group_of[left] |= group_of[right]
                for member in group_of[left]:
                    group_of[member] = group_of[left]
    unique = {id(group): group for group in group_of.values()}
    return [sorted(group) for group in unique.values() if len(group) > 1]


def is_dense(tensor: Tensor) -> bool:
    """Returns whether a plain tensor's elements fill one range of memory, each byte once."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def _bytes_taken(tensor: Tensor, span: Span, start: int, length: int) -> Tensor:
    size = tensor.element_size()
    taken = torch.zeros(length, dtype=torch.bool, device="cpu")
    # An expanded dimension repeats its bytes; torch refuses to write through one.
    shape = [n if step else 1 for n, step in zip(tensor.shape, tensor.stride(), strict=True)]
    stride = [step * size for step in tensor.stride()]
    shape, stride = [*shape, size], [*stride, 1]
    taken.as_strided(shape, stride, span.first - start).fill_(True)
    return taken
