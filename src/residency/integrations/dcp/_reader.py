"""The reader for ``dcp.load``: saves of this library, and every other checkpoint that it knows."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
)
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from residency._checkpoint._disk import (
    MANIFEST,
    FileReads,
    Wanted,
    damage_named,
    new_token,
    read_files,
)
from residency._checkpoint._document import TENSOR, Node, kind_of
from residency._checkpoint._restore import understood
from residency._checkpoint._sources import Source, StoredTensor, open_source
from residency._errors import CheckpointError, CorruptSaveError, RefusedError
from residency._transfer import memory_of
from residency.integrations.dcp._reads import ShardRead, batches, elements, leaves


class ResidencyStorageReader(StorageReader):
    """A reader of this library's saves for ``dcp.load``, values included; it checks what it reads.

    Args:
        path: A save, or a `Checkpointer`'s directory, whose newest save is meant.

    Memory:
        64 MiB on the host, or the largest tensor that is no contiguous host tensor of its own
        dtype, if that is more.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Reads nothing and writes nothing yet."""
        self._path = Path(path)
        self._source: Source | None = None
        self._nodes: dict[str, Node] = {}
        self._tensors: dict[str, Sequence[StoredTensor]] = {}

    @property
    def checkpoint_id(self) -> Path:
        """The save that is read."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns whether this is the path of a directory."""
        return Path(checkpoint_id).is_dir()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a load, from a new place if one is given."""
        self._source = None
        if checkpoint_id is not None:
            self._path = Path(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the names, shapes and values in the save.

        Raises:
            CorruptSaveError: It is damaged.
            RefusedError: There is no save of this library.
        """
        source = open_source(self._path)
        if source.kind != "residency":
            raise RefusedError(
                f"{self._path} holds a checkpoint of the kind {source.kind!r}, and this reader"
                " takes saves of residency. Use torch's own reader, or residency.restore."
            )
        self._source = source
        entries: dict[str, Any] = {}
        paths: dict[str, Any] = {}
        self._nodes, self._tensors = {}, {}
        for path, node in leaves(source.values, ()):
            name = ".".join(map(str, path))
            paths[name] = path
            if kind_of(node) == TENSOR:
                self._tensors[name] = shards = self._shards(source, node["name"])
                entries[name] = _metadata_of(shards)
            else:
                self._nodes[name] = node
                entries[name] = BytesStorageMetadata()
        return Metadata(
            entries,
            planner_data=paths,
            storage_data={},
            storage_meta=StorageMeta(checkpoint_id=self._path, load_id=new_token()),
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: object, **kwargs: object
    ) -> None:
        """Does nothing: the reader knows its save already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Returns the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Returns the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills the tensors that the planner names.

        Raises:
            CorruptSaveError: A chunk of a file has changed since it was written.
        """
        with damage_named(self._opened().path, file=MANIFEST):
            self._read(plan, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                blob = io.BytesIO()
                node = self._nodes[item.storage_index.fqn]
                torch.save(understood(item.storage_index.fqn, node, self._read_whole), blob)
                blob.seek(0)
                planner.load_bytes(item, blob)
        tensors = [item for item in plan.items if item.type == LoadItemType.TENSOR]
        for batch in batches([ShardRead(item, self._shard_of(item), planner) for item in tensors]):
            self._fetch([read for read in batch if read.num_bytes])
            for read in batch:
                read.finish()

    def _shard_of(self, item: ReadItem) -> StoredTensor:
        index = item.storage_index
        shards = self._tensors[index.fqn]
        offsets = tuple(index.offset or ())
        return next((s for s in shards if s.offsets == offsets), shards[0])

    def _opened(self) -> Source:
        if self._source is None:
            raise CheckpointError(
                "read_data was called on a reader that has read no metadata; call dcp.load, "
                "which reads it first."
            )
        return self._source

    def _shards(self, source: Source, name: str) -> Sequence[StoredTensor]:
        if name not in source.tensors:
            raise CorruptSaveError(f"{self._path} has no bytes for {name!r}.", tensor=name)
        return source.tensors[name]

    def _read_whole(self, name: str) -> Tensor:
        """Returns a tensor that stands within a value."""
        [stored] = self._shards(self._opened(), name)
        data = torch.empty(stored.num_bytes, dtype=torch.uint8)
        self._fetch_into([(stored, 0, data)])
        return elements(data, stored)

    def _fetch(self, reads: Sequence[ShardRead]) -> None:
        self._fetch_into([(read.stored, read.start, read.data) for read in reads])

    def _fetch_into(self, wanted_bytes: Sequence[tuple[StoredTensor, int, Tensor]]) -> None:
        checksums = self._opened().checksums
        wanted: dict[Path, list[Wanted]] = {}
        for stored, start, data in wanted_bytes:
            if stored.file is not None and data.numel():
                memory = memory_of(data)
                one = Wanted(stored.start + start, data.numel(), stored.name, memory)
                wanted.setdefault(stored.file, []).append(one)
        read_files([FileReads(path, ranges, checksums[path]) for path, ranges in wanted.items()])


def _metadata_of(shards: Sequence[StoredTensor]) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(s.offsets), torch.Size(s.shape)) for s in shards]
    properties = TensorProperties(dtype=shards[0].dtype)
    return TensorStorageMetadata(properties, torch.Size(shards[0].whole_shape), chunks)
