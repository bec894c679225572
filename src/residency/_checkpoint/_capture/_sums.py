"""Sums over all bytes of device tensors, before and after they are copied.

A writer that passes no gate is seen by them, down to one element: sums of rows and of columns of
the bytes differ unless several changes cancel in both. Nothing waits on the host; the answers come
with the copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from residency import _pinned
from residency._checkpoint._capture._blocks import Block

_ROW = 2048  # words of a row


class Sums:
    """A comparison of the bytes of some blocks at two moments of the device."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._index = {id(block): index for index, block in enumerate(blocks)}
        self._spans = [block.span for block in blocks]
        self._before = [_sums_of(span) for span in self._spans]
        self._differs = _pinned.allocate_pinned(len(blocks)).view(torch.bool)
        self._on_device: list[Tensor] = []

    def compare(self) -> tuple[Tensor, Tensor]:
        """Computes the sums again, on the current stream.

        Returns:
            The host memory of the answers, and the device's, which the caller copies into it.
        """
        differs = [
            torch.stack([(a != b).any() for a, b in zip(before, _sums_of(span), strict=True)]).any()
            for before, span in zip(self._before, self._spans, strict=True)
        ]
        found = torch.stack(differs)
        self._on_device.append(found)  # until the copy has read it
        return self._differs, found

    def let_go(self) -> None:
        """Drops what is on the device, once the copies are done."""
        self._spans, self._before, self._on_device = [], [], []

    def differs(self, block: Block) -> bool:
        """Returns whether the bytes changed; the copies' event is done."""
        return bool(self._differs[self._index[id(block)]])


def _sums_of(span: Tensor) -> list[Tensor]:
    """Returns sums over the rows and the columns of the bytes, in integers that wrap around."""
    words = span if span.storage_offset() % 8 or span.numel() < 8 else _words_of(span)
    sums = []
    num_whole = words.numel() // _ROW * _ROW
    if num_whole:
        table = words[:num_whole].view(-1, _ROW)
        sums += [table.sum(0, dtype=torch.int64), table.sum(1, dtype=torch.int64)]
    rest = words[num_whole:]
    tail = span[words.numel() * words.element_size() :]
    # Less than a row is compared as it is.
    return [*sums, rest.clone(), tail.clone()]


def _words_of(span: Tensor) -> Tensor:
    return span[: span.numel() // 8 * 8].view(torch.int64)
