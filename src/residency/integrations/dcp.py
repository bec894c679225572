"""Parts for ``torch.distributed.checkpoint``: a stager, a training state, and a storage writer and
reader that use this library's format. The latter are here, the others in files of their own.

What is written is a save as a `Checkpointer` publishes it: safetensors files and a manifest, with
checksums and without a pickle, in a directory that gets its name when all is on the disk. What
`dcp.save` calls bytes, Python values that are no tensors, stands in the manifest as JSON.

[Note: who writes what] `dcp.save` decides which rank writes which tensor or shard. Each rank writes
files of its own into one directory beside the target; their sizes and checksums travel to the
coordinator with torch's own collective, which also carries the first error to every rank. Only the
coordinator publishes, and only when no rank failed.
"""

from __future__ import annotations

import io
import logging
import os
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from residency import _device
from residency._checkpoint._decode import decode
from residency._checkpoint._disk._folder import SaveFolder
from residency._checkpoint._disk._layout import new_token, saving_name, step_of
from residency._checkpoint._disk._lock import FileLock
from residency._checkpoint._disk._manifest import MANIFEST, Manifest, dump_manifest
from residency._checkpoint._disk._marks import WRITERS, remove_own
from residency._checkpoint._disk._naming import damage_named
from residency._checkpoint._disk._parts import leased
from residency._checkpoint._disk._publish import CheckpointDirectory
from residency._checkpoint._disk._read import FileReads, Wanted, read_files
from residency._checkpoint._disk._system import SYSTEM, sync_folder, write_file
from residency._checkpoint._disk._write import write_files
from residency._checkpoint._nodes import TENSOR, Node, kind_of
from residency._checkpoint._sources import Source, Stored, open_source
from residency._errors import CheckpointError, CorruptSaveError, RefusedError
from residency._transfer import memory_of
from residency.integrations._dcp_read import Read, batches, elements, leaves
from residency.integrations._dcp_stager import PinnedStager
from residency.integrations._dcp_state import TrainState, TrainStatePlanner
from residency.integrations._dcp_write import (
    Assignment,
    RankPlan,
    Share,
    all_files,
    planned_bytes,
    reports_of,
)

__all__ = [
    "PinnedStager",
    "ResidencyStorageReader",
    "ResidencyStorageWriter",
    "TrainState",
    "TrainStatePlanner",
]

_logger = logging.getLogger("residency")


class ResidencyStorageWriter(StorageWriter):
    """A storage that makes a save of this library of what ``dcp.save`` and ``dcp.async_save`` give.

    An error of any rank or writer thread is raised by ``dcp.save``, on every rank, or by the future
    of ``dcp.async_save``; nothing is published then, and the next save works.

    Args:
        path: The directory that becomes the save. It must not exist, or be empty; a save never
            replaces another. Named ``step-`` and eight digits, it is one of the saves of a
            `Checkpointer` on the directory above.

    Memory:
        On the host, for the tensors of which bytes are being written (two or three at a time), a
        copy each unless they lie there contiguously, and 8 MiB.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Reads nothing and writes nothing yet."""
        self._path = Path(path).absolute()  # once: a later os.chdir changes nothing
        self._folder: SaveFolder | None = None
        self._world_size = 1

    @property
    def checkpoint_id(self) -> Path:
        """The directory that becomes the save."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Says whether this is a path, rather than an address, that could be written to."""
        if "://" in str(checkpoint_id):
            return False
        parents = [p for p in Path(checkpoint_id).absolute().parents if p.exists()]
        return bool(parents) and os.access(parents[0], os.W_OK)

    def storage_meta(self) -> StorageMeta:
        """Returns what planners may want to know of this save."""
        return StorageMeta(checkpoint_id=self._path, save_id=new_token())

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a save, in a new place if one is given; removes what a failed one left."""
        self._abandon()
        if checkpoint_id is not None:
            self._path = Path(checkpoint_id).absolute()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Takes the settings of ``dcp.save``.

        Raises:
            RefusedError: Ranks are to save without a word to each other.
        """
        self._abandon()
        if not kwargs.get("use_collectives", True):
            raise RefusedError(
                "use_collectives=False would make a save of each rank, none of them whole. Nothing"
                " was saved; leave it on, or use torch's FileSystemWriter."
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Returns the plan as it is.

        Raises:
            RefusedError: There is something at the path already.
        """
        if self._path.is_dir() and not any(self._path.iterdir()):
            return plan
        if self._path.exists():
            raise RefusedError(
                f"{self._path} exists, and a save never replaces another. Nothing was saved; give"
                " another path, or remove it."
            )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Makes the directory in which all ranks write, and tells them.

        Raises:
            RefusedError: It cannot be written to, has no room, or has another writer.
        """
        parent = self._path.parent
        CheckpointDirectory(parent).check_writable(
            sum(planned_bytes(item) for plan in plans for item in plan.items)
        )
        told = [Assignment(rank, len(plans)) for rank in range(len(plans))]
        self._folder = self._save_folder()
        self._clear(self._folder.path)
        self._folder.join()
        return [replace(p, storage_data=each) for p, each in zip(plans, told, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's share, and returns when it is on the disk.

        Raises:
            CheckpointError: It could not be written.
            RefusedError: A value is of a kind that JSON cannot hold without a pickle.
        """
        told: Assignment = plan.storage_data
        folder = self._save_folder()
        _device.synchronize()  # the threads that copy know nothing of the caller's streams
        names: list[str] = []
        try:
            share = RankPlan(plan, planner, told)
            plans = share.files()
            names = [each.name for each in plans]
            folder.join()
            with leased(plans) as files:
                written = write_files(folder.path, files)
        except BaseException:
            folder.remove_data(names)
            if told.world_size == 1:
                self._abandon()
            raise
        finally:
            folder.leave()
        done = Share(told.rank, written.files, share.nodes, share.notes)
        num_bytes = sum(record.num_bytes for record in written.files.values())
        result = WriteResult(MetadataIndex(f"rank {told.rank}"), num_bytes, done)
        future: Future[list[WriteResult]] = Future()
        future.set_result([result])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publishes the save, once every rank has written.

        Raises:
            CheckpointError: It could not be.
        """
        folder = self._folder
        if folder is None:
            raise CheckpointError("finish was called on a writer that has not prepared a save.")
        try:
            shares = [result.storage_data for of_rank in results for result in of_rank]
            reports = reports_of(metadata, sorted(shares, key=lambda share: share.rank))
            manifest = Manifest(step_of(self._path.name) or 0, new_token(), {}, reports)
            for name, record in all_files(reports):
                if (folder.path / name).stat().st_size != record.num_bytes:
                    raise CheckpointError(f"{folder.path / name} is not as its rank wrote it.")
            write_file(SYSTEM, folder.path / MANIFEST, dump_manifest(manifest))
            folder.strip()
            sync_folder(SYSTEM, folder.path)
            SYSTEM.rename(folder.path, self._path)
        except OSError as error:
            raise CheckpointError(f"{self._path} could not be published: {error}") from error
        finally:
            self._abandon()
        try:
            sync_folder(SYSTEM, self._path.parent)
        except OSError as error:  # it is published: an error here would say that it is not
            _logger.warning("the name of %s may not be on the disk yet: %s", self._path, str(error))

    def _save_folder(self) -> SaveFolder:
        """Returns the directory of a save under way.

        Its name follows from the target's, and not from the plan: a planner may keep its plan, and
        what a writer put into it, for later saves.
        """
        target = zlib.crc32(os.fsencode(self._path.name))
        name = saving_name(step_of(self._path.name) or 0, f"dcp-{target:08x}")
        return SaveFolder(SYSTEM, self._path.with_name(name))

    def _clear(self, folder: Path) -> None:
        """Removes what a dead writer of this save left; a living one is not disturbed."""
        lock = FileLock(SYSTEM, folder / WRITERS)
        with suppress(FileNotFoundError):
            try:
                if not lock.take(shared=False):
                    raise RefusedError(
                        f"{self._path} is being written by another writer. Nothing was saved; give"
                        " another path."
                    )
                remove_own(SYSTEM, folder)
            finally:
                lock.give_back()

    def _abandon(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            remove_own(SYSTEM, folder.path)  # nothing, where it was published
            folder.leave()


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
        self._tensors: dict[str, Sequence[Stored]] = {}

    @property
    def checkpoint_id(self) -> Path:
        """What is read."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Says whether this is the path of a directory."""
        return Path(checkpoint_id).is_dir()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a load, from a new place if one is given."""
        self._source = None
        if checkpoint_id is not None:
            self._path = Path(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns what the save holds.

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
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Does nothing: what there is to know is known."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Returns the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Returns the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills what the planner asks for.

        Raises:
            CorruptSaveError: A chunk of a file is not what was written.
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
                torch.save(decode(node, self._read_whole), blob)
                blob.seek(0)
                planner.load_bytes(item, blob)
        tensors = [item for item in plan.items if item.type == LoadItemType.TENSOR]
        for batch in batches([Read(item, self._place(item), planner) for item in tensors]):
            self._fetch([read for read in batch if read.num_bytes])
            for read in batch:
                read.finish()

    def _place(self, item: ReadItem) -> Stored:
        index = item.storage_index
        shards = self._tensors[index.fqn]
        offsets = tuple(index.offset or ())
        return next((s for s in shards if s.offsets == offsets), shards[0])

    def _opened(self) -> Source:
        if self._source is None:
            raise CheckpointError("read_data was called on a reader that has read no metadata.")
        return self._source

    def _shards(self, source: Source, name: str) -> Sequence[Stored]:
        if name not in source.tensors:
            raise CorruptSaveError(f"{self._path} has no bytes for {name!r}.", tensor=name)
        return source.tensors[name]

    def _read_whole(self, name: str) -> Tensor:
        """Returns a tensor that stands within a value."""
        [stored] = self._shards(self._opened(), name)
        data = torch.empty(stored.num_bytes, dtype=torch.uint8)
        self._fetch_into([(stored, 0, data)])
        return elements(data, stored)

    def _fetch(self, reads: Sequence[Read]) -> None:
        self._fetch_into([(read.stored, read.start, read.data) for read in reads])

    def _fetch_into(self, places: Sequence[tuple[Stored, int, Tensor]]) -> None:
        checksums = self._opened().files
        wanted: dict[Path, list[Wanted]] = {}
        for stored, start, data in places:
            if stored.file is not None and data.numel():
                memory = memory_of(data)
                one = Wanted(stored.start + start, data.numel(), stored.name, memory)
                wanted.setdefault(stored.file, []).append(one)
        read_files([FileReads(path, ranges, checksums[path]) for path, ranges in wanted.items()])


def _metadata_of(shards: Sequence[Stored]) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(s.offsets), torch.Size(s.shape)) for s in shards]
    properties = TensorProperties(dtype=shards[0].dtype)
    return TensorStorageMetadata(properties, torch.Size(shards[0].whole_shape), chunks)
