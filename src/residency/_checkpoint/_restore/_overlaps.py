"""Targets that share memory: a byte that two names ask for has one value, or the plan is refused.

Tied tensors and views are asked for under each of their names. Where a save has the same for all of
them, it is read once; where it does not, no order of reading would be right. Invariant: after
``settle_overlaps`` no two assignments write different bytes to one place
(``tests/checkpoint/restore/test_overlaps.py`` tries to break it).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from residency._checkpoint._restore._boxes import Box, row_major
from residency._checkpoint._restore._fill import fill
from residency._checkpoint._restore._plan import Assignment, Plan, Target
from residency._checkpoint._sources._stored import Stored
from residency._modes import callers_modes_off
from residency._storages import sharing


def settle_overlaps(plan: Plan, *, staging_bytes: int) -> list[str]:
    """Takes assignments out of a plan that others of it make needless.

    Args:
        plan: What is to be filled; no target is written.
        staging_bytes: How much host memory a comparison of what is saved may take.

    Returns:
        What contradicts each other, as sentences; the last one of each is left in the plan.

    Raises:
        CorruptSaveError: What had to be compared is damaged.
    """
    problems: list[str] = []
    dropped: set[int] = set()
    for group in sharing([each.target.local for each in plan.assignments]):
        last_of: dict[Any, int] = {}
        for index in group:
            here = plan.assignments[index]
            before = last_of.get(_geometry(here.target))
            if before is not None:
                dropped.add(before)
                other = plan.assignments[before]
                if not _is_same_saved(plan, other, here, staging_bytes):
                    problems.append(_conflict(other, here))
            last_of[_geometry(here.target)] = index
        for left, right in _apart(plan, list(last_of.values())):
            dropped.add(left)
            problems.append(_conflict(plan.assignments[left], plan.assignments[right]))
    if dropped:
        kept = [each for index, each in enumerate(plan.assignments) if index not in dropped]
        plan.assignments[:] = kept
    return problems


def _conflict(left: Assignment, right: Assignment) -> str:
    return (
        f"{left.target.name} and {right.target.name}: they share memory here, and differ in what "
        "was saved"
    )


def _geometry(target: Target) -> tuple[object, ...]:
    """Returns what is equal for targets that are the same elements in the same memory."""
    local = target.local
    return local.data_ptr(), local.dtype, local.shape, local.stride(), target.box


def _apart(plan: Plan, indices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields pairs that share bytes in other ways here than in the files."""
    anchors = {index: _anchor(plan.assignments[index]) for index in indices}
    if len(set(anchors.values())) == 1 and None not in anchors.values():
        return
    for position, left in enumerate(indices):
        for right in indices[position + 1 :]:
            if anchors[left] is not None and anchors[left] == anchors[right]:
                continue
            if sharing([plan.assignments[each].target.local for each in (left, right)]):
                yield left, right


def _anchor(assignment: Assignment) -> tuple[object, int] | None:
    """Returns where the bytes of a target come from, as seen from its memory: equal for all that
    lie among one another as they lie in the file. None for what lies in another order.
    """
    local, shards = assignment.target.local, assignment.shards
    if len(shards) != 1 or shards[0].shape != tuple(local.shape):
        return None
    [shard] = shards
    source, start, stride = _place(shard)
    order = zip(local.shape, local.stride(), stride, strict=True)
    if any(size > 1 and here != there for size, here, there in order):
        return None
    return source, start - local.data_ptr()


def _place(shard: Stored) -> tuple[object, int, tuple[int, ...]]:
    if shard.tensor is not None:
        return "host", shard.tensor.data_ptr(), shard.tensor.stride()
    stride = row_major(shard.shape) if shard.stride is None else tuple(shard.stride)
    return shard.file, shard.start, stride


def _is_same_saved(plan: Plan, left: Assignment, right: Assignment, staging_bytes: int) -> bool:
    """Returns whether two assignments of one geometry bring the same bytes."""
    places = [[(_place(s), s.offsets, s.shape) for s in each.shards] for each in (left, right)]
    if places[0] == places[1]:
        return True
    for box in _slices(left.target, staging_bytes // 2):
        found = [_read(plan, each, box, staging_bytes) for each in (left, right)]
        if not torch.equal(found[0], found[1]):
            return False
    return True


def _slices(target: Target, most_bytes: int) -> Iterator[Box]:
    """Yields the box of a target in groups of rows of so many bytes, of one row at least."""
    box = target.box
    if not box.shape or not box.numel:
        yield box
        return
    row_bytes = box.numel // box.shape[0] * target.local.element_size()
    step = max(most_bytes // row_bytes, 1)
    for first in range(0, box.shape[0], step):
        rows = min(step, box.shape[0] - first)
        yield Box((box.offsets[0] + first, *box.offsets[1:]), (rows, *box.shape[1:]))


def _read(plan: Plan, assignment: Assignment, box: Box, staging_bytes: int) -> Tensor:
    target = assignment.target
    with callers_modes_off():
        made = torch.empty(box.shape, dtype=target.local.dtype, device="cpu")
    place = Target(target.name, made, made, box, target.whole_shape)
    fill(
        [Assignment(place, assignment.shards)],
        checksums=plan.checksums,
        staging_bytes=staging_bytes,
    )
    return made.reshape(-1).view(torch.uint8)
