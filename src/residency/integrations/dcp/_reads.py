"""How `ResidencyStorageReader` reads: which items a save has, and boxes of tensors on their way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from residency._checkpoint._document import (
    MAPPINGS,
    MODULE,
    OPTIMIZER,
    STATEFUL,
    TENSOR,
    Node,
    is_plain_dict,
    kind_of,
    pairs_of,
    tensor_node,
)
from residency._checkpoint._sources import StoredTensor
from residency._errors import CheckpointError
from residency._transfer import copy_across, raw_bytes
from residency._units import parse_bytes

_BATCH_BYTES = parse_bytes("64MiB")


class ShardRead:
    """One box of a stored shard on its way to where the planner wants it."""

    def __init__(self, item: ReadItem, stored: StoredTensor, planner: LoadPlanner) -> None:
        self.stored = stored
        self._item, self._planner = item, planner
        self._target = planner.resolve_tensor(item).detach()
        if self._target.shape != item.lengths:
            raise CheckpointError(
                f"{stored.name!r}: {tuple(item.lengths)} is to be read into a tensor of shape"
                f" {tuple(self._target.shape)}."
            )
        self._rows = stored.shape[:1]
        self.start, self.num_bytes = 0, stored.num_bytes
        if stored.shape and stored.stride is None and stored.num_bytes:
            row_bytes = stored.num_bytes // stored.shape[0]  # only the rows that are asked for
            self.start = item.storage_offsets[0] * row_bytes
            self.num_bytes = item.lengths[0] * row_bytes
            self._rows = (item.lengths[0],)
        self._is_direct = (
            self._target.device.type == "cpu"
            and self._target.is_contiguous()
            and self._target.dtype == stored.dtype
            and self._target.nbytes == self.num_bytes
            and stored.stride is None
        )
        self._data: Tensor | None = None

    @property
    def held_bytes(self) -> int:
        """What it needs on the host beside the target."""
        return 0 if self._is_direct else self.num_bytes

    @property
    def data(self) -> Tensor:
        """Where the bytes go."""
        if self._data is None:
            if self._is_direct:
                self._data = raw_bytes(self._target)
            else:
                self._data = torch.empty(self.num_bytes, dtype=torch.uint8)
        return self._data

    def finish(self) -> None:
        """Carries the bytes on, and tells the planner."""
        if not self._is_direct and self.num_bytes:
            rows = self.stored._replace(shape=(*self._rows, *self.stored.shape[1:]))
            found = elements(self.data, rows)
            is_cut = rows.shape != self.stored.shape or self.stored.stride is None
            for dim, size in enumerate(self._item.lengths):
                begin = 0 if dim == 0 and is_cut else self._item.storage_offsets[dim]
                found = found.narrow(dim, begin, size)
            copy_across(self._target, found)
        self._data = None
        self._planner.commit_tensor(self._item, self._target)


def batches(reads: Sequence[ShardRead]) -> Iterator[list[ShardRead]]:
    """Yields reads in groups that need a bounded host memory at once."""
    batch: list[ShardRead] = []
    held = 0
    for read in reads:
        if batch and held + read.held_bytes > _BATCH_BYTES:
            yield batch
            batch, held = [], 0
        batch.append(read)
        held += read.held_bytes
    if batch:
        yield batch


def leaves(node: Node, path: tuple[object, ...]) -> Iterator[tuple[tuple[Any, ...], Node]]:
    """Yields what `dcp.load` takes for one item each, with its path. Objects are state dicts."""
    kind = kind_of(node)
    if kind == MODULE:
        for key, name in zip(node["keys"], node["names"], strict=True):
            yield (*path, key), tensor_node(name)
        yield from leaves(node["extra"], path)
    elif kind == OPTIMIZER:
        groups = zip(node["groups"], node["parameters"], strict=True)
        named = [{**hyper, "params": names} for hyper, names in groups]
        yield from leaves({"state": node["state"], "param_groups": named}, path)
    elif kind == STATEFUL:
        yield from leaves(node["state"], path)
    elif _is_mapping(node):
        for key, each in pairs_of(node):
            yield from leaves(each, (*path, str(key)))
    elif isinstance(node, list) and not _is_terminal(node):
        for index, each in enumerate(node):
            yield from leaves(each, (*path, index))
    else:
        yield path, node


def _is_mapping(node: Node) -> bool:
    return is_plain_dict(node) or kind_of(node) in MAPPINGS


def _is_terminal(node: Node) -> bool:
    """Returns whether a list is one item: it has no tensor, no mapping, and no list that has one.

    Source: `traverse_state_dict` in torch/distributed/checkpoint/_traverse.py.
    """
    if not isinstance(node, list):
        return not (_is_mapping(node) or kind_of(node) == TENSOR)
    return all(_is_terminal(each) for each in node)


def elements(data: Tensor, stored: StoredTensor) -> Tensor:
    """Returns the elements that bytes are, in their order."""
    flat = data.view(stored.dtype) if data.numel() else torch.empty(0, dtype=stored.dtype)
    if stored.stride is not None and data.numel():
        return flat.as_strided(stored.shape, stored.stride)
    return flat.view(stored.shape)
