"""Targets that share memory: a byte that two names ask for has one value, or the plan is refused.

Tied tensors and views are asked for under each of their names. Where a save has equal bytes for
what they share, the order of reading does not matter; where it does not, no order would be right.
Only the bytes tell: a save may hold a tensor and a part of it apart. Invariant, which
``tests/checkpoint/restore/test_overlaps.py`` tries to break: after ``settle_overlaps`` no two
targets get different bytes at to one place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from residency._checkpoint._restore._boxes import Box, row_major, spans
from residency._checkpoint._restore._fill import fill
from residency._checkpoint._restore._plan import Remedied, RestorePlan, Target
from residency._checkpoint._sources._source import StoredTensor
from residency._modes import callers_modes_off
from residency._storages import sharing


def settle_overlaps(plan: RestorePlan) -> list[str]:
    """Takes targets out of a plan that others of it make needless.

    Args:
        plan: What is to be filled; no target is written.

    Returns:
        What contradicts each other, as sentences; the last one of each is left in the plan.

    Raises:
        CorruptSaveError: What had to be compared is damaged.
    """
    problems = _late_conflicts(plan)
    dropped: set[int] = set()
    for group in sharing([each.local for each in plan.targets]):
        last_of: dict[object, int] = {}
        for index in group:
            here = plan.targets[index]
            before = last_of.get(_geometry(here))
            if before is not None:
                dropped.add(before)
                other = plan.targets[before]
                if not _is_same_saved(plan, other, here):
                    problems.append(_conflict(other, here))
            last_of[_geometry(here)] = index
        for left, right in _apart(plan, list(last_of.values())):
            pair = plan.targets[left], plan.targets[right]
            if not _is_same_saved(plan, *pair):
                dropped.add(left)
                problems.append(_conflict(*pair))
    if dropped:
        remaining = [each for index, each in enumerate(plan.targets) if index not in dropped]
        plan.targets[:] = remaining
    return problems


def is_same_stored(plan: RestorePlan, left: str, right: str) -> bool:
    """Returns whether a save has equal tensors under two names.

    Raises:
        CorruptSaveError: What had to be compared is damaged.

    Memory:
        Host: as ``_is_same_saved``.
    """
    mine, theirs = plan.source.tensors[left], plan.source.tensors[right]
    dtype, shape = mine[0].dtype, tuple(mine[0].whole_shape)
    if (theirs[0].dtype, tuple(theirs[0].whole_shape)) != (dtype, shape):
        return False
    if 0 in shape:
        return True
    whole = Box((0,) * len(shape), shape)
    with callers_modes_off():  # as if both were to lie there
        place = torch.empty(shape, dtype=dtype, device="meta")
    targets = [Target(left, place, whole, shape, shards) for shards in (mine, theirs)]
    return _is_same_saved(plan, *targets)


def _late_conflicts(plan: RestorePlan) -> list[str]:
    """Returns what lies in memory that is written after the rest, whatever was saved of it."""
    if not plan.late:
        return []
    names = [each.name for each in plan.targets] + [name for name, _ in plan.late]
    tensors = [each.local for each in plan.targets] + [each for _, each in plan.late]
    return [
        f"{' and '.join(names[i] for i in group)}: they share memory here, and one of them is read "
        "in another order"
        for group in sharing(tensors)
        if group[-1] >= len(plan.targets)
    ]


def _conflict(left: Target, right: Target) -> str:
    return Remedied(
        f"{left.name} and {right.name}: they share memory here, and their saved "
        "values differ; untie them here, as they were when they were saved"
    )


def _geometry(target: Target) -> tuple[object, ...]:
    """Returns what is equal for targets that are the same elements in the same memory."""
    local = target.local
    return local.data_ptr(), local.dtype, local.shape, local.stride(), target.box


def _apart(plan: RestorePlan, indices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields pairs that share bytes in other ways here than in the files."""
    anchors = {index: _anchor(plan.targets[index]) for index in indices}
    if len(set(anchors.values())) == 1 and None not in anchors.values():
        return
    for position, left in enumerate(indices):
        for right in indices[position + 1 :]:
            if anchors[left] is not None and anchors[left] == anchors[right]:
                continue
            if sharing([plan.targets[each].local for each in (left, right)]):
                yield left, right


def _anchor(target: Target) -> tuple[object, int] | None:
    """Returns where the bytes of a target come from, as seen from its memory: equal for all that
    lie among one another as they lie in the file. None for what lies in another order.
    """
    local, shards = target.local, target.shards
    if len(shards) != 1 or shards[0].shape != tuple(local.shape):
        return None
    [shard] = shards
    source, start, stride = _bytes_of(shard)
    order = zip(local.shape, local.stride(), stride, strict=True)
    if any(size > 1 and here != there for size, here, there in order):
        return None
    return source, start - local.data_ptr()


def _bytes_of(shard: StoredTensor) -> tuple[object, int, tuple[int, ...]]:
    if shard.tensor is not None:
        return "host", shard.tensor.data_ptr(), shard.tensor.stride()
    stride = row_major(shard.shape) if shard.stride is None else tuple(shard.stride)
    return shard.file, shard.start, stride


def _places(shards: Sequence[StoredTensor]) -> list[object]:
    return [(_bytes_of(each), each.offsets, each.shape) for each in shards]


def _is_same_saved(plan: RestorePlan, left: Target, right: Target) -> bool:
    """Returns whether two targets bring the same bytes to the memory that both lie in.

    Memory:
        Host: at most the plan's ``staging_bytes``.
    """
    is_one_place = _geometry(left) == _geometry(right)
    if is_one_place and _places(left.shards) == _places(right.shards):
        return True
    most_bytes = plan.staging_bytes // 8
    areas = [_areas(each, most_bytes) for each in (left, right)]
    for mine, theirs in _meeting(*areas):
        first, last = max(mine.first, theirs.first), min(mine.last, theirs.last)
        found = []
        for target, area in ((left, mine), (right, theirs)):
            data, is_set = _laid(plan, target, area)
            part = slice(first - area.first, last - area.first)
            found.append((data[part], is_set[part]))
        (ours, is_ours), (others, is_others) = found
        if bool((ours.ne(others) & is_ours & is_others).any()):
            return False
    return True


class _AddressedBox(NamedTuple):
    """A box of a target with the addresses between which its elements lie."""

    first: int
    last: int
    box: Box


def _areas(target: Target, most_bytes: int) -> list[_AddressedBox]:
    """Returns a target in areas of so many bytes of memory, gaps included, by address."""
    local, start = target.local, target.local.data_ptr()
    size = local.element_size()
    return sorted(
        _AddressedBox(start + span.start * size, start + (span.start + span.numel) * size, span.box)
        for span in spans(target.box, target.box, local.stride(), max(most_bytes // size, 1))
    )


def _meeting(
    left: Sequence[_AddressedBox], right: Sequence[_AddressedBox]
) -> Iterator[tuple[_AddressedBox, _AddressedBox]]:
    """Yields the pairs of areas of which the ranges overlap."""
    near: list[_AddressedBox] = []
    rest = deque(right)
    for mine in left:
        while rest and rest[0].first < mine.last:
            near.append(rest.popleft())
        near = [theirs for theirs in near if theirs.last > mine.first]
        yield from ((mine, theirs) for theirs in near if theirs.first < mine.last)


def _laid(plan: RestorePlan, target: Target, area: _AddressedBox) -> tuple[Tensor, Tensor]:
    """Returns what is saved of an area as it will lie in memory, and which bytes are of it.

    Memory:
        Host: four times the bytes between the area's first and last, at most.
    """
    dtype, stride = target.local.dtype, target.local.stride()
    numel = (area.last - area.first) // target.local.element_size()
    with callers_modes_off():
        read = torch.empty(area.box.shape, dtype=dtype, device="cpu")
        data = torch.zeros(numel, dtype=dtype, device="cpu")
        is_set = torch.zeros((numel, dtype.itemsize), dtype=torch.bool, device="cpu")
    fill(
        [Target(target.name, read, area.box, target.whole_shape, target.shards)],
        checksums=plan.source.checksums,
        staging_bytes=plan.staging_bytes,
    )
    data.as_strided(read.shape, stride).copy_(read)
    rows = [step * dtype.itemsize for step in stride]
    is_set.as_strided((*read.shape, dtype.itemsize), (*rows, 1)).fill_(True)
    return data.view(torch.uint8), is_set.view(-1)
