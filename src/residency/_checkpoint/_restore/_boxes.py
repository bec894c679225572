"""Boxes: parts of a tensor as ranges per dimension, and where they lie in memory and in files.

A shard is a box of its whole tensor. What a rank wants of a saved shard is the box where the two
overlap, which is one range of bytes where rows are cut, and many where columns are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: per dimension the first index and how many there are."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def overlap(self, other: Box) -> Box | None:
        """Returns what both contain, or None where that is nothing."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = [
            min(a + m, b + n)
            for a, m, b, n in zip(self.offsets, self.shape, other.offsets, other.shape, strict=True)
        ]
        shape = tuple(end - start for start, end in zip(offsets, ends, strict=True))
        return Box(offsets, shape) if all(size > 0 for size in shape) else None

    def within(self, outer: Box) -> Box:
        """Returns this box as seen from the first element of ``outer``."""
        pairs = zip(self.offsets, outer.offsets, strict=True)
        return Box(tuple(a - b for a, b in pairs), self.shape)


@lru_cache(maxsize=256)
def whole_box(shape: tuple[int, ...]) -> Box:
    """Returns the box that is all of a tensor: one for all tensors of a shape."""
    return Box((0,) * len(shape), shape)


class Stretch(NamedTuple):
    """A range of elements that is contiguous on both sides.

    Attributes:
        source: Its first element in the saved shard.
        target: Its first element in the target.
        numel: How many there are.
    """

    source: int
    target: int
    numel: int


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a tensor whose elements lie in order."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


def count_stretches(box: Box, source: Box, target: Box) -> int:
    """Returns how many ranges ``stretches`` would yield."""
    return math.prod(box.shape[: _first_inner(box, source, target)])


def stretches(box: Box, source: Box, target: Box) -> Iterator[Stretch]:
    """Yields the ranges of ``box`` in a saved shard and in a target, both in row-major order."""
    inner = _first_inner(box, source, target)
    numel = math.prod(box.shape[inner:])
    in_source, in_target = box.within(source), box.within(target)
    source_strides, target_strides = row_major(source.shape), row_major(target.shape)
    source_start = _element(in_source.offsets, source_strides)
    target_start = _element(in_target.offsets, target_strides)
    for index in product(*(range(size) for size in box.shape[:inner])):
        yield Stretch(
            source_start + _element(index, source_strides),
            target_start + _element(index, target_strides),
            numel,
        )


def _first_inner(box: Box, source: Box, target: Box) -> int:
    """Returns the dimension from which on elements of the part lie in order on both sides."""
    inner = len(box.shape)
    while inner > 0:
        inner -= 1
        size = box.shape[inner]
        if size != source.shape[inner] or size != target.shape[inner]:
            break
    return inner


def _element(index: Sequence[int], strides: Sequence[int]) -> int:
    return sum(i * stride for i, stride in zip(index, strides, strict=False))


class BoxSpan(NamedTuple):
    """A box of a saved shard with the range of elements in which it lies.

    Attributes:
        box: The box, in the whole tensor.
        start: The first element's place in the saved shard.
        numel: From the first element to the last, those between that are of no part included.
    """

    box: Box
    start: int
    numel: int


def spans(box: Box, source: Box, strides: Sequence[int], most_elements: int) -> Iterator[BoxSpan]:
    """Cuts a box until each piece spans at most ``most_elements`` of the saved shard's memory."""
    pending = [box]
    while pending:
        box = pending.pop()
        start = _element(box.within(source).offsets, strides)
        numel = 1 + _element([size - 1 for size in box.shape], strides)
        if numel <= most_elements or box.numel == 1:
            yield BoxSpan(box, start, numel)
            continue
        steps = [(size - 1) * stride for size, stride in zip(box.shape, strides, strict=True)]
        dim = steps.index(max(steps))
        half = box.shape[dim] // 2
        for first, size in ((half, box.shape[dim] - half), (0, half)):
            offsets, shape = list(box.offsets), list(box.shape)
            offsets[dim] += first
            shape[dim] = size
            pending.append(Box(tuple(offsets), tuple(shape)))
