"""The writer for ``dcp.save``: a save as a `Checkpointer` publishes it, by several ranks.

What is written is safetensors files and a manifest, with checksums and without a pickle, in a
directory that gets its name when all is on the disk. What `dcp.save` calls bytes, Python values
that are no tensors, stands in the manifest as JSON.

[Note: who writes what] `dcp.save` decides which rank writes which tensor or shard. Each rank writes
files of its own into one directory beside the target; their sizes and checksums travel to the
coordinator with torch's own collective, which also carries the first error to every rank. Only the
coordinator publishes, and only when no rank failed.
"""

from __future__ import annotations

import logging
import os
import zlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from residency import _device
from residency._checkpoint._disk import (
    MANIFEST,
    SYSTEM,
    WRITERS,
    CheckpointDirectory,
    FileLock,
    Manifest,
    SaveFolder,
    dump_manifest,
    leased,
    new_token,
    remove_own,
    saving_name,
    step_of,
    sync_folder,
    write_file,
    write_files,
)
from residency._errors import CheckpointError, InvalidArgumentError, RefusedError
from residency.integrations.dcp._rank_plan import (
    RankAssignment,
    RankPlan,
    Share,
    all_files,
    planned_bytes,
    reports_of,
)

_logger = logging.getLogger("residency")


class ResidencyStorageWriter(StorageWriter):
    """A storage that writes ``dcp.save`` and ``dcp.async_save`` as a save of this library.

    An error of any rank or writer thread is raised by ``dcp.save``, on every rank, or by the future
    of ``dcp.async_save``; nothing is published then, and the next save works.

    Args:
        path: The directory that becomes the save. It must not exist, or be empty. Named ``step-``
            and eight digits, it is one of the saves of a `Checkpointer` on the directory above.
        overwrite: Whether a save that is at the path already goes when the new one is whole; only
            for such a name.

    Raises:
        InvalidArgumentError: ``overwrite`` is asked for at a path of another name.

    Memory:
        On the host, for the tensors whose bytes are being written (two or three at a time), a
        copy each unless they lie there contiguously, and 8 MiB.
    """

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Reads nothing and writes nothing yet."""
        self._path = Path(path).absolute()  # once: a later os.chdir changes nothing
        self._overwrite = overwrite
        self._check_name()
        self._folder: SaveFolder | None = None
        self._world_size = 1

    @property
    def checkpoint_id(self) -> Path:
        """The directory that becomes the save."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns whether this is a path, rather than an address, that could be written to."""
        if "://" in str(checkpoint_id):
            return False
        parents = [p for p in Path(checkpoint_id).absolute().parents if p.exists()]
        return bool(parents) and os.access(parents[0], os.W_OK)

    def storage_meta(self) -> StorageMeta:
        """Returns the facts about this save that planners may need."""
        return StorageMeta(checkpoint_id=self._path, save_id=new_token())

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a save, in a new place if one is given; removes the rest of a failed one."""
        self._abandon()
        if checkpoint_id is not None:
            self._path = Path(checkpoint_id).absolute()
            self._check_name()

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None:
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
        if self._overwrite or (self._path.is_dir() and not any(self._path.iterdir())):
            return plan
        if self._path.exists():
            raise RefusedError(
                f"{self._path} exists, and a save never replaces another without overwrite=True."
                " Nothing was saved; give another path, or remove it."
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
        assignments = [RankAssignment(rank, len(plans)) for rank in range(len(plans))]
        self._folder = self._save_folder()
        self._clear(self._folder.path)
        self._folder.join()
        return [replace(p, storage_data=each) for p, each in zip(plans, assignments, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's share, and returns when it is on the disk.

        Raises:
            CheckpointError: It could not be written.
            RefusedError: A value is of a kind that JSON cannot hold without a pickle.
        """
        assignment: RankAssignment = plan.storage_data
        folder = self._save_folder()
        _device.synchronize()  # the threads that copy know nothing of the caller's streams
        names: list[str] = []
        try:
            share = RankPlan(plan, planner, assignment)
            plans = share.files()
            names = [each.name for each in plans]
            folder.join()
            with leased(plans) as files:
                written = write_files(folder.path, files)
        except BaseException:
            folder.remove_data(names)
            if assignment.world_size == 1:
                self._abandon()
            raise
        finally:
            folder.leave()
        done = Share(assignment.rank, written, share.nodes, share.notes)
        num_bytes = sum(record.num_bytes for record in written.values())
        result = WriteResult(MetadataIndex(f"rank {assignment.rank}"), num_bytes, done)
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
            raise CheckpointError(
                "finish was called on a writer that has not prepared a save; call dcp.save, "
                "which prepares it."
            )
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
            if self._overwrite:
                CheckpointDirectory(self._path.parent).publish(folder.path, manifest.step)
            else:
                SYSTEM.rename(folder.path, self._path)
        except OSError as error:
            raise CheckpointError(f"{self._path} could not be published: {error}") from error
        finally:
            self._abandon()
        try:
            sync_folder(SYSTEM, self._path.parent)
        except OSError as error:  # it is published: an error here would say that it is not
            _logger.warning("the name of %s may not be on the disk yet: %s", self._path, str(error))

    def _check_name(self) -> None:
        if self._overwrite and step_of(self._path.name) is None:
            raise InvalidArgumentError(
                f"overwrite=True replaces a save named step-00000010, and this one is called "
                f"{self._path.name!r}; name it so, or remove the save that is there."
            )

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
