"""What bytes a save copies: tensors that overlap in one storage become one block, copied once.

A block is the span of a storage that is needed, never the whole storage of a small view. Where one
tensor of a block covers it densely, the block is stored as that tensor, under its name; the others
are described as views of it. Invariant, which ``tests/checkpoint/test_snapshot.py`` tries to break:
the blocks of a save do not overlap.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from residency._checkpoint._capture._walk import check_plain_layout
from residency._checkpoint._disk._manifest import Record
from residency._checkpoint._document._dtypes import STORED_DTYPES
from residency._checkpoint._document._encode import SPAN, Leaf
from residency._checkpoint._document._notes import bytes_note, elsewhere_note, shard_note, view_note
from residency._dtensor import is_sharded, local_of, shard_offsets, sharded_among
from residency._errors import RefusedError
from residency._modes import callers_modes_off
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
        source: A contiguous tensor that is the bytes, in the caller's storage; of one dtype, shape
            and strides in all blocks with one ``laid``.
        gather: How the stored tensor lies in the span, where its elements are not in order.
        is_early: Whether others than optimizers may change the bytes.
        lent: The loan, of a state that lives on the host.
        laid: How the tensors over the block lie in the span, by name; of the tensor that it is
            stored as, where there is no other.
        num_bytes: The bytes of the span.
    """

    record: Record
    source: Tensor
    gather: Layout | None
    is_early: bool
    lent: Lent | None
    laid: Layout | dict[str, Layout]
    num_bytes: int

    @property
    def span(self) -> Tensor:
        """The bytes as ``uint8`` of shape ``[num_bytes]``."""
        first = int(self.source.storage_offset()) * self.source.element_size()
        return _bytes_of(self.source, first, self.num_bytes)

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


@dataclass(slots=True, eq=False)
class _Format:
    """A device, dtype, shape and strides, with all that follows from them, asked once.

    Attributes:
        layout: The place of one that is alone in its block.
        stored: The name that safetensors has for the dtype.
        num_bytes: The bytes of the elements.
        span_bytes: The bytes from the first element to the last.
        is_in_order: Whether they are contiguous.
        storages: Of the device, by address: the number of the tensor in it, or of all that are.
    """

    layout: Layout
    stored: str | None
    num_bytes: int
    span_bytes: int
    is_in_order: bool
    storages: dict[int, int | list[int]]


class _Located(NamedTuple):
    leaf: Leaf
    local: Tensor
    form: _Format
    first: int
    number: int

    @property
    def last(self) -> int:
        return self.first + self.form.span_bytes


@callers_modes_off()
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
    special: dict[str, Any] = {}
    known: dict[object, _Format] = {}
    on_device: dict[torch.device, dict[int, int | list[int]]] = {}
    found: list[_Located] = []
    are_shared = rank is not None or bool(sharded_among([leaf.value for leaf in leaves.values()]))
    for leaf in leaves.values():
        local = local_of(leaf.value) if leaf.lent is None else leaf.lent.tensor
        form = _format_of(leaf, local, known, on_device)
        if are_shared and not _is_written_here(leaf, local, special, replicated, rank):
            continue
        number = len(found)
        first, address = 0, ~number  # of one without bytes, which overlaps with none
        if form.span_bytes:
            storage = local.untyped_storage()
            first = int(local.storage_offset()) * form.layout.dtype.itemsize
            if storage.nbytes() < first + form.span_bytes:
                _refuse_freed(leaf, first + form.span_bytes, storage.nbytes())
            address = storage.data_ptr()
        found.append(_Located(leaf, local, form, first, number))
        before = form.storages.setdefault(address, number)
        if isinstance(before, list):
            before.append(number)
        elif before != number:
            form.storages[address] = [before, number]
    blocks: list[tuple[int, Block]] = []
    for here in (each for storages in on_device.values() for each in storages.values()):
        if isinstance(here, list):
            for cluster in _clusters([found[number] for number in here]):
                block = _block_of(cluster, special)
                blocks.append((min(each.number for each in cluster), block))
        elif found[here].form.is_in_order:
            blocks.append((here, _block_alone(found[here], special)))
        else:
            blocks.append((here, _block_of([found[here]], special)))
    blocks.sort(key=itemgetter(0))
    return Blocks([block for _, block in blocks], special)


def _format_of(
    leaf: Leaf,
    local: Tensor,
    known: dict[object, _Format],
    on_device: dict[torch.device, dict[int, int | list[int]]],
) -> _Format:
    # All in which two of one format may differ.
    if type(local) is not Tensor or local.layout is not torch.strided or local.is_neg():
        check_plain_layout(leaf, local)
    key = dtype, device, shape, stride = local.dtype, local.device, local.shape, local.stride()
    form = known.get(key)
    if form is None or (dtype.is_complex and local.is_conj()):
        check_plain_layout(leaf, local)
        known[key] = form = _Format(
            Layout(dtype, tuple(shape), stride, 0),
            STORED_DTYPES.get(dtype),
            local.numel() * dtype.itemsize,
            _span_elements(local) * dtype.itemsize if local.numel() else 0,
            local.is_contiguous(),
            on_device.setdefault(device, {}),
        )
    return form


def _is_written_here(
    leaf: Leaf,
    local: Tensor,
    special: dict[str, Any],
    replicated: Collection[str],
    rank: int | None,
) -> bool:
    """Returns whether this rank writes a tensor, or a shard; notes what the document says of it."""
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
    return writer == rank and note.get("offsets", ()) is not None


def _refuse_freed(leaf: Leaf, wanted: int, found: int) -> NoReturn:
    """Refuses a tensor whose storage was made shorter than it; its bytes are nowhere."""
    raise RefusedError(
        f"{leaf.name} needs {wanted} bytes of a storage that has {found}: its memory was freed, as "
        "FSDP1 does with parameters that are gathered elsewhere. Nothing was saved; save it while "
        "it has its memory."
    )


def _span_elements(tensor: Tensor) -> int:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def _clusters(located: list[_Located]) -> list[list[_Located]]:
    """Groups the tensors of one storage that overlap, directly or through others."""
    clusters: list[list[_Located]] = []
    reach = -1
    for each in sorted(located, key=lambda p: (p.first, -p.last)):
        if each.first < reach:
            clusters[-1].append(each)
        else:
            clusters.append([each])
        reach = max(reach, each.last)
    return clusters


def _block_alone(one: _Located, special: dict[str, Any]) -> Block:
    """Returns ``_block_of`` one tensor in order, as nearly all are; alike ones have one layout."""
    leaf, source, form, first, _ = one
    if form.stored in (None, "BOOL"):  # of bools, torch's copy may make other bytes
        source = _bytes_of(source, first, form.span_bytes)
    elif type(source) is not Tensor:
        source = source.as_subclass(Tensor)
    record = _record(leaf, form, special)
    return Block(record, source, None, leaf.is_early, leaf.lent, form.layout, form.span_bytes)


def _block_of(cluster: list[_Located], special: dict[str, Any]) -> Block:
    first = cluster[0].first
    if len({each.form.layout.dtype for each in cluster}) > 1:
        first = first // _MAX_ITEMSIZE * _MAX_ITEMSIZE  # each lies at a multiple of its itemsize
    last = max(each.last for each in cluster)
    # Storages of one address may differ in length: two `from_numpy` over one array.
    longest = cluster[0]
    if len(cluster) > 1:
        longest = max(cluster, key=lambda each: each.local.untyped_storage().nbytes())
    span = _bytes_of(longest.local, first, last - first)
    is_early = any(each.leaf.is_early for each in cluster)
    # A loan of a part of a block ends, and the whole block is copied.
    loans = (p.leaf.lent for p in cluster if (p.first, p.last) == (first, last))
    lent = next((each for each in loans if each is not None), None)
    layouts = {
        each.leaf.name: each.form.layout._replace(start=each.first - first) for each in cluster
    }
    whole = _whole_of(cluster, last - first)
    if whole is None:
        name = cluster[0].leaf.name + SPAN
        record = Record(name, "U8", (last - first,), last - first)
        seen, gather = layouts, None
    else:
        layout = layouts[whole.leaf.name]
        record = _record(whole.leaf, whole.form, special)
        is_in_order = whole.form.is_in_order
        gather = None if is_in_order else layout
        others = {n: each for n, each in layouts.items() if n != record.name}
        seen = others if is_in_order else dict.fromkeys(others, _in_order(layout))
    for name, layout in seen.items():
        note = view_note(
            layout.dtype, layout.shape, stride=layout.stride, of=record.name, start=layout.start
        )
        special.setdefault(name, {}).update(note)
    return Block(record, span, gather, is_early, lent, layouts, last - first)


def _whole_of(cluster: list[_Located], num_bytes: int) -> _Located | None:
    """Returns the tensor as which a span is stored, or None where it is stored as bytes."""
    if len(cluster) == 1:
        # An expanded tensor repeats its elements.
        is_short = cluster[0].form.num_bytes <= cluster[0].form.span_bytes
        return cluster[0] if is_short else None
    whole = next(
        (
            each
            for each in cluster
            if each.form.span_bytes == num_bytes
            and torch.ops.aten.is_non_overlapping_and_dense.default(each.local)
        ),
        None,
    )
    if whole is None or whole.form.is_in_order:
        return whole
    # What is stored in another order than it lies in has no views but itself.
    is_one = all(each.form is whole.form and each.first == whole.first for each in cluster)
    return whole if is_one else None


def _in_order(layout: Layout) -> Layout:
    stride = torch.empty(layout.shape, device="meta").stride()
    return layout._replace(stride=stride, start=0)


@callers_modes_off()
def _bytes_of(tensor: Tensor, first: int, num_bytes: int) -> Tensor:
    span = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    # Without a view, which would keep the tensor.
    storage = tensor.untyped_storage()
    return span.set_(storage, first, (num_bytes,), (1,)) if num_bytes else span


def _record(leaf: Leaf, form: _Format, special: dict[str, Any]) -> Record:
    layout, num_bytes = form.layout, form.num_bytes
    if form.stored is None:
        special.setdefault(leaf.name, {}).update(bytes_note(layout.dtype, layout.shape))
        return Record(leaf.name, "U8", (num_bytes,), num_bytes)
    offsets = special[leaf.name].get("offsets") if leaf.name in special else None
    offsets = None if offsets is None else tuple(offsets)
    return Record(leaf.name, form.stored, layout.shape, num_bytes, offsets)


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
