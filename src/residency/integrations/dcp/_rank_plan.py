"""How `ResidencyStorageWriter` writes: a rank's files and values, and the documents of them all."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

# undoes what DCP's planner does (torch 2.13)
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from residency._checkpoint._disk import FilePlan, FileRecord, Part, RankReport, Record, file_name
from residency._checkpoint._document import (
    DICT,
    STORED_DTYPES,
    Encoder,
    Node,
    bytes_note,
    elsewhere_note,
    is_plain_key,
    mapping_node,
    shard_note,
    tensor_node,
)
from residency._errors import CheckpointError, RefusedError
from residency._transfer import memory_of, raw_bytes

_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_TOP_LEVEL = "tensors"  # the file of what stands at the top of the state


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """The message of the coordinator to a rank."""

    rank: int
    world_size: int


@dataclass(frozen=True, slots=True)
class Share:
    """The message of a rank to the coordinator: what it wrote."""

    rank: int
    files: Mapping[str, FileRecord]
    nodes: Mapping[str, Node]  # of values, by name
    notes: Mapping[str, dict[str, Any]]  # of tensors, as in a document; {} where nothing is special


class RankPlan:
    """The files that one rank writes, the nodes of its values and the notes of its tensors."""

    def __init__(self, plan: SavePlan, planner: SavePlanner, assignment: RankAssignment) -> None:
        self.nodes: dict[str, Node] = {}
        self.notes: dict[str, dict[str, object]] = {}
        self._assignment = assignment
        self._paths: Mapping[str, Sequence[object]] = plan.planner_data or {}
        self._parts: dict[str, list[Part]] = {}
        self._taken: set[tuple[str, str]] = set()
        for item in plan.items:
            name = item.index.fqn
            if item.type == WriteItemType.BYTE_IO:
                encoder = Encoder()
                self.nodes[name] = encoder.node(name, _value_of(planner, item))
                for leaf in encoder.leaves.values():
                    self._add(name, leaf.name, *_whole_part(leaf.value.cpu().contiguous()))
            else:
                self._add(name, name, *_planned_part(planner, item))

    def files(self) -> list[FilePlan]:
        """Returns the files of this rank."""
        return [FilePlan(name, parts) for name, parts in self._parts.items()]

    def _add(
        self, item: str, name: str, record: Record, note: dict[str, object], part: Part
    ) -> None:
        path = self._paths.get(item, (item,))
        top = str(path[0]) if len(path) > 1 and _FILE.fullmatch(str(path[0])) else _TOP_LEVEL
        top, count = top.removesuffix(".safetensors"), 0
        assignment = self._assignment
        file = file_name(top, rank=assignment.rank, world_size=assignment.world_size)
        while (file, name) in self._taken:  # a file has one shard of a tensor
            count += 1
            more = f"{top}.{count}"
            file = file_name(more, rank=assignment.rank, world_size=assignment.world_size)
        if count and "dtype" in note:
            raise RefusedError(
                f"this rank has several shards of {name!r}, which is {note['dtype']}: safetensors"
                " has no such dtype, and so no place for their offsets. Nothing was saved."
            )
        self._taken.add((file, name))
        self.notes[name] = note
        self._parts.setdefault(file, []).append(replace(part, record=record._replace(name=name)))


def _value_of(planner: SavePlanner, item: WriteItem) -> Any:
    """Returns a value that is no tensor, without a pickle where the planner is torch's own."""
    own = DefaultSavePlanner.transform_object
    if isinstance(planner, DefaultSavePlanner) and type(planner).transform_object is own:
        return planner.lookup_object(item.index)
    blob: Any = planner.resolve_data(item)
    blob.seek(0)
    try:
        return torch.load(blob, map_location="cpu", weights_only=True)
    except Exception as error:
        raise RefusedError(
            f"{item.index.fqn!r} comes from {type(planner).__name__} as bytes that torch.load with"
            f" weights_only=True does not take: {error}"
        ) from error


def _whole_part(tensor: torch.Tensor) -> tuple[Record, dict[str, object], Part]:
    record, note = _record("", tensor.dtype, tuple(tensor.shape), None)
    data = raw_bytes(tensor)
    return record, note, Part(record, lambda: memory_of(data), _nothing)


def _planned_part(planner: SavePlanner, item: WriteItem) -> tuple[Record, dict[str, object], Part]:
    name, planned = item.index.fqn, item.tensor_data
    if planned is None:
        raise CheckpointError(f"the plan says nothing of the tensor {name!r}.")
    dtype, shape = planned.properties.dtype, tuple(planned.chunk.sizes)
    is_shard = item.type == WriteItemType.SHARD
    offsets = tuple(planned.chunk.offsets) if is_shard else None
    record, note = _record(name, dtype, shape, offsets)
    if is_shard:
        note |= shard_note(planned.size, planned.chunk.offsets)

    def acquire() -> memoryview:
        found: Any = planner.resolve_data(item)
        tensor = found.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"it is {tensor.dtype} of shape {tuple(tensor.shape)}, planned was {dtype} {shape}."
            )
        return memory_of(raw_bytes(tensor))

    return record, note, Part(record, acquire, _nothing)


def _record(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], offsets: tuple[int, ...] | None
) -> tuple[Record, dict[str, object]]:
    num_bytes = math.prod(shape) * dtype.itemsize
    stored = STORED_DTYPES.get(dtype)
    if stored is None:
        return Record(name, "U8", (num_bytes,), num_bytes), bytes_note(dtype, shape)
    return Record(name, stored, shape, num_bytes, offsets), {}


def _nothing() -> None:
    return None


def planned_bytes(item: WriteItem) -> int:
    planned = item.tensor_data
    if planned is None:
        return 0
    return math.prod(planned.chunk.sizes) * planned.properties.dtype.itemsize


def reports_of(metadata: Metadata, shares: Sequence[Share]) -> list[RankReport]:
    """Gives each rank a document of the whole state, with notes of the tensors for that rank."""
    paths = metadata.planner_data or {}
    tensors = _tensor_names(metadata)
    nodes: dict[str, object] = {name: tensor_node(name) for name in tensors}
    for share in shares:
        nodes |= share.nodes
    order = [name for name in paths if name in nodes]  # that of the state
    where = {name: paths.get(name, (name,)) for name in dict.fromkeys((*order, *nodes))}
    tree = _as_node(unflatten_state_dict({n: _PlannedLeaf(nodes[n]) for n in where}, where))
    writers: dict[str, int] = {}
    for share in shares:
        for name in share.notes:
            writers.setdefault(name, share.rank)
    documents = []
    for share in shares:
        notes = {name: note for name, note in share.notes.items() if note}
        for name, rank in writers.items():
            if name in share.notes:
                continue
            whole = shares[rank].notes[name].get("whole_shape")
            notes[name] = elsewhere_note(rank) if whole is None else shard_note(whole, None)
        documents.append({"tree": tree, "tensors": notes})
    return [RankReport(d, s.files) for d, s in zip(documents, shares, strict=True)]


@dataclass(frozen=True, slots=True)
class _PlannedLeaf:
    node: Node


def _as_node(value: object) -> Node:
    if isinstance(value, _PlannedLeaf):
        return value.node
    if isinstance(value, list):
        return [_as_node(each) for each in value]
    if isinstance(value, dict):
        if not all(map(is_plain_key, value)):
            return mapping_node(DICT, [[key, _as_node(each)] for key, each in value.items()])
        return {key: _as_node(each) for key, each in value.items()}
    return value


def _tensor_names(metadata: Metadata) -> list[str]:
    entries = metadata.state_dict_metadata.items()
    return [name for name, entry in entries if isinstance(entry, TensorStorageMetadata)]


def all_files(reports: Sequence[RankReport]) -> Iterator[tuple[str, FileRecord]]:
    for report in reports:
        yield from report.files.items()
