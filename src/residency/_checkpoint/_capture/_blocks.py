"""What bytes a save copies: tensors that overlap in one storage become one block, copied once.

A block is the span of a storage that is needed, never the whole storage of a small view. Where one
tensor of a block covers it densely, the block is stored as that tensor, under its name; the others
are described as views of it. Invariant, which ``tests/checkpoint/test_snapshot.py`` tries to break:
the blocks of a save do not overlap.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from residency._checkpoint._capture._walk import check_plain_layout
from residency._checkpoint._disk._manifest import Record
from residency._checkpoint._document._dtypes import STORED_DTYPES
from residency._checkpoint._document._encode import SPAN, Leaf
from residency._checkpoint._document._notes import bytes_note, elsewhere_note, shard_note, view_note
from residency._dtensor import is_sharded, local_of, shard_offsets
from residency._errors import RefusedError
from residency._transfer import Lent

_MAX_ITEMSIZE = torch.complex128.itemsize


class Layout(NamedTuple):
    """The place of a tensor in its block: ``start`` is in bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int


@dataclass(slots=True, eq=False)
class Block:
    """A span of one storage.

    Attributes:
        record: How the block is stored.
        span: The bytes, ``uint8`` of shape ``[num_bytes]``, a view of the caller's storage.
        gather: How the stored tensor lies in the span, where its elements are not in order.
        is_early: Whether others than optimizers may change the bytes.
        lent: The loan, of a state that lives on the host.
        laid: How the tensors over the block lie in the span, by name; of the tensor that it is
            stored as, where there is no other.
        num_bytes: The bytes of the span.
    """

    record: Record
    span: Tensor
    gather: Layout | None
    is_early: bool
    lent: Lent | None
    laid: Layout | dict[str, Layout]
    num_bytes: int

    @property
    def names(self) -> Collection[str]:
        """What the tensors over the block are called."""
        return self.laid if isinstance(self.laid, dict) else (self.record.name,)

    @property
    def layouts(self) -> dict[str, Layout]:
        """How the tensors over the block lie in the span, by name."""
        return self.laid if isinstance(self.laid, dict) else {self.record.name: self.laid}


class Blocks(NamedTuple):
    """The blocks that a save writes, with the document's notes on tensors."""

    blocks: list[Block]
    special: dict[str, Any]


class _LocatedLeaf(NamedTuple):
    leaf: Leaf
    local: Tensor
    first: int
    last: int


def make_blocks(
    leaves: Mapping[str, Leaf], *, replicated: Collection[str] = (), rank: int | None = None
) -> Blocks:
    """Finds the spans that hold the bytes of all leaves.

    Args:
        leaves: The tensors by name.
        replicated: Names of what every rank has, which rank 0 writes.
        rank: This process's, where each tensor that several ranks have is wanted of one alone;
            None takes all that is here.

    Raises:
        RefusedError: A tensor has no plain layout, or is a partial sum.
    """
    special: dict[str, object] = {}
    on_device: dict[torch.device, dict[int, int | list[int]]] = {}
    found: list[Leaf] = []
    locals_found: list[Tensor] = []
    blocks: list[Block] = []
    for leaf in leaves.values():
        local = local_of(leaf.value) if leaf.lent is None else leaf.lent.tensor
        check_plain_layout(leaf, local)
        note = _shard_note(leaf, local)
        writer = rank
        if rank is not None and note:
            writer = _first_replica(leaf.value)
        elif rank is not None and leaf.name in replicated:
            writer = 0
        if writer != rank:
            note |= elsewhere_note(writer)
        if note:
            special[leaf.name] = note
        if writer != rank or note.get("offsets", ()) is None:
            continue
        if local.numel() == 0:
            blocks.append(_block_of([_LocatedLeaf(leaf, local, 0, 0)], special))
            continue
        _check_has_bytes(leaf, local)
        storages = on_device.setdefault(local.device, {})
        address = local.untyped_storage().data_ptr()
        index = len(found)
        before = storages.setdefault(address, index)
        if isinstance(before, list):
            before.append(index)
        elif before != index:
            storages[address] = [before, index]
        found.append(leaf)
        locals_found.append(local)
    known: dict[Layout, Layout] = {}
    for here in (each for storages in on_device.values() for each in storages.values()):
        if isinstance(here, list):
            located = [_located(found[index], locals_found[index]) for index in here]
            blocks += [_block_of(cluster, special) for cluster in _clusters(located)]
        elif locals_found[here].is_contiguous():
            blocks.append(_block_alone(found[here], locals_found[here], special, known))
        else:
            blocks.append(_block_of([_located(found[here], locals_found[here])], special))
    order = {name: index for index, name in enumerate(leaves)}
    blocks.sort(key=lambda block: min(order[name] for name in block.names))
    return Blocks(blocks, special)


def _located(leaf: Leaf, local: Tensor) -> _LocatedLeaf:
    return _LocatedLeaf(leaf, local, *_range_of(local))


def _range_of(local: Tensor) -> tuple[int, int]:
    """Returns the first byte of its storage that a tensor has, and the one behind its last."""
    itemsize = local.element_size()
    first = int(local.storage_offset()) * itemsize
    return first, first + _span_elements(local) * itemsize


def _check_has_bytes(leaf: Leaf, local: Tensor) -> None:
    """Refuses a tensor whose storage was made shorter than it; its bytes are nowhere."""
    found, (_, last) = local.untyped_storage().nbytes(), _range_of(local)
    if found < last:
        raise RefusedError(
            f"{leaf.name} needs {last} bytes of a storage that has {found}: its memory was freed, "
            "as FSDP1 does with parameters that are gathered elsewhere. Nothing was saved; save it "
            "while it has its memory."
        )


def _span_elements(tensor: Tensor) -> int:
    if tensor.is_contiguous():
        return tensor.numel()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def _clusters(located: list[_LocatedLeaf]) -> list[list[_LocatedLeaf]]:
    """Groups the tensors of one storage that overlap, directly or through others."""
    clusters: list[list[_LocatedLeaf]] = []
    reach = -1
    for each in sorted(located, key=lambda p: (p.first, -p.last)):
        if each.first < reach:
            clusters[-1].append(each)
        else:
            clusters.append([each])
        reach = max(reach, each.last)
    return clusters


def _block_alone(
    leaf: Leaf, local: Tensor, special: dict[str, object], known: dict[Layout, Layout]
) -> Block:
    """Returns ``_block_of`` one tensor in order, as nearly all are; alike ones have one layout."""
    first, last = _range_of(local)
    layout = Layout(local.dtype, tuple(local.shape), local.stride(), 0)
    layout = known.setdefault(layout, layout)
    record = _record(leaf, layout, special)
    span = _bytes_of(local, first, last)
    return Block(record, span, None, leaf.is_early, leaf.lent, layout, last - first)


def _block_of(cluster: list[_LocatedLeaf], special: dict[str, Any]) -> Block:
    first = cluster[0].first
    if len({each.local.dtype for each in cluster}) > 1:
        first = first // _MAX_ITEMSIZE * _MAX_ITEMSIZE  # each lies at a multiple of its itemsize
    last = max(each.last for each in cluster)
    # Storages of one address may differ in length: two `from_numpy` over one array.
    longest = cluster[0]
    if len(cluster) > 1:
        longest = max(cluster, key=lambda each: each.local.untyped_storage().nbytes())
    span = _bytes_of(longest.local, first, last)
    is_early = any(each.leaf.is_early for each in cluster)
    # A loan of a part of a block ends, and the whole block is copied.
    loans = (p.leaf.lent for p in cluster if (p.first, p.last) == (first, last))
    lent = next((each for each in loans if each is not None), None)
    layouts = {
        each.leaf.name: Layout(
            each.local.dtype, tuple(each.local.shape), each.local.stride(), each.first - first
        )
        for each in cluster
    }
    whole = _whole_of(cluster, last - first)
    if whole is None:
        name = cluster[0].leaf.name + SPAN
        record = Record(name, "U8", (last - first,), last - first)
        seen, gather = layouts, None
    else:
        layout = layouts[whole.leaf.name]
        record = _record(whole.leaf, layout, special)
        is_in_order = whole.local.is_contiguous()
        gather = None if is_in_order else layout
        others = {n: each for n, each in layouts.items() if n != record.name}
        seen = others if is_in_order else dict.fromkeys(others, _in_order(layout))
    for name, layout in seen.items():
        note = view_note(
            layout.dtype, layout.shape, stride=layout.stride, of=record.name, start=layout.start
        )
        special.setdefault(name, {}).update(note)
    return Block(record, span, gather, is_early, lent, layouts, last - first)


def _whole_of(cluster: list[_LocatedLeaf], num_bytes: int) -> _LocatedLeaf | None:
    """Returns the tensor as which a span is stored, or None where it is stored as bytes."""
    if len(cluster) == 1:
        local = cluster[0].local
        # An expanded tensor repeats its elements.
        is_short = local.numel() <= max(_span_elements(local), 0)
        return cluster[0] if is_short else None
    whole = next(
        (
            each
            for each in cluster
            if each.last - each.first == num_bytes
            and torch.ops.aten.is_non_overlapping_and_dense.default(each.local)
        ),
        None,
    )
    if whole is None or whole.local.is_contiguous():
        return whole
    # What is stored in another order than it lies in has no views but itself.
    is_one = all(
        (each.local.dtype, each.local.shape, each.local.stride(), each.first)
        == (whole.local.dtype, whole.local.shape, whole.local.stride(), whole.first)
        for each in cluster
    )
    return whole if is_one else None


def _in_order(layout: Layout) -> Layout:
    stride = torch.empty(layout.shape, device="meta").stride()
    return layout._replace(stride=stride, start=0)


def _bytes_of(tensor: Tensor, first: int, last: int) -> Tensor:
    span = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return span.set_(tensor.untyped_storage(), first, (last - first,), (1,)) if last else span


def _record(leaf: Leaf, layout: Layout, special: dict[str, Any]) -> Record:
    num_bytes = torch.Size(layout.shape).numel() * layout.dtype.itemsize
    stored = STORED_DTYPES.get(layout.dtype)
    offsets = special.get(leaf.name, {}).get("offsets")
    if stored is None:
        special.setdefault(leaf.name, {}).update(bytes_note(layout.dtype, layout.shape))
        return Record(leaf.name, "U8", (num_bytes,), num_bytes)
    return Record(
        leaf.name, stored, layout.shape, num_bytes, None if offsets is None else tuple(offsets)
    )


def _shard_note(leaf: Leaf, local: Tensor) -> dict[str, Any]:
    """Returns what the document says of a shard: where in the whole it lies."""
    sharded: Any = leaf.value
    if not is_sharded(sharded):
        return {}
    offsets = shard_offsets(leaf.name, sharded, done="saved")
    is_here = local.numel() > 0 or sharded.numel() == 0
    first = int(sharded.device_mesh.mesh.min())
    return shard_note(sharded.shape, offsets if is_here else None, first)


def _first_replica(value: Any) -> int:
    """Returns the rank that writes this shard: of those that have it, the first on the mesh."""
    mesh = value.device_mesh
    where = [
        0 if placement.is_replicate() else coordinate
        for placement, coordinate in zip(value.placements, mesh.get_coordinate(), strict=True)
    ]
    return int(mesh.mesh[tuple(where)])
