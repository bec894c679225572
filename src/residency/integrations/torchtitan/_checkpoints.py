"""The manager of torchtitan's checkpoints that saves and loads by way of the host.

It is torchtitan's own ``CheckpointManager``, its schedule, its states and their names, with another
writer, reader, stager and retention. Invariant, which ``tests/integrations/test_torchtitan.py``
tries to break: a step's save is whole or not there, and neither a save nor a load makes a copy of a
tensor on the device.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from residency._checkpoint import spare_bytes
from residency._checkpoint._disk import (
    MANIFEST,
    SYSTEM,
    CheckpointDirectory,
    Retention,
    make_folders,
)
from residency._dtensor import remade
from residency._errors import CheckpointError, CorruptSaveError, RefusedError, warn
from residency.integrations.dcp import (
    PinnedStager,
    ResidencyStorageReader,
    ResidencyStorageWriter,
)
from residency.integrations.torchtitan._plain import PlainOptimizers
from residency.integrations.torchtitan._published import check_methods, published

_PACKAGE = "torchtitan.components.checkpointer"
_Manager: Any = published(_PACKAGE, "CheckpointManager")
_AsyncMode: Any = published(_PACKAGE, "AsyncMode")
_MODEL: str = published(_PACKAGE, "MODEL")
_OPTIMIZER: str = published(_PACKAGE, "OPTIMIZER")
# What is overridden here; it has no effect unless torchtitan's own methods call it.
check_methods(
    _Manager,
    "dcp_save",
    "dcp_load",
    "_close",
    "_create_checkpoint_id",
    "_find_load_step",
    "_load",
    "_maybe_wait_for_staging",
    "_purge_stale_checkpoints",
    "_save_last_step",
    "_states_to_load",
    "_wait_for_saving",
)
_logger = logging.getLogger("residency")


class ResidencyCheckpointManager(_Manager):  # type: ignore[misc]  # known when it runs
    """Torchtitan's ``CheckpointManager`` with this library's saves, in ``folder/step-00000010``.

    Built by its own ``Config``, which the override ``save_with_residency`` puts in the place of
    torchtitan's, whose fields it has: ``interval``, ``keep_latest_k``, ``load_step`` and all
    others keep their meaning. With ``async_mode`` "async" and "async_with_pinned_mem" alike, a
    save returns when its copies are queued, and a thread writes it; the step after it waits for
    them on the device, and blocks the host only if an offloaded optimizer has used up ``spare``.
    The next save, and ``close``, wait until it is written, and raise its error if it failed.

    Loads take these saves, and the checkpoints that torchtitan wrote itself. A folder may have
    both; the greater step counts. A newest save that is damaged is passed over with a warning,
    unless ``load_step`` names it. Exports for Hugging Face are written and read by torchtitan.

    Raises:
        RefusedError: The folder is a remote one.
        InvalidArgumentError: ``spare`` does not parse.

    Memory:
        Device: none at a save, and none at a load except for state that stays there; an optimizer
        that has no state yet gets it on the host, and on the device in its first step, or not at
        all if it is offloaded. Copies that hooks of a model make in its ``state_dict()`` are
        torchtitan's. Host: ``async_mode="disabled"`` two or three tensors at a time; else one set
        of pinned slabs, as ``PinnedStager`` has them, for state that is not lent; at a load 64 MiB,
        or one tensor if that is more, and the state of a plain optimizer until its first step; at
        the last save the model in ``export_dtype`` if that is another.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_Manager.Config):  # type: ignore[misc]  # known when it runs
        """The fields of torchtitan's, and one more.

        Attributes:
            spare: As in ``residency.integrations.dcp.PinnedStager``.
        """

        spare: int | str | None = None

    save_future: Future[Any] | None
    staging_future: object

    def __init__(self, config: Config, **parts: Any) -> None:
        """Builds torchtitan's manager; allocates nothing yet."""
        spare_bytes(config.spare)  # before anything is built
        for folder in (config.folder, parts.get("base_folder", "")):
            if config.enable and "://" in str(folder):
                raise RefusedError(
                    f"checkpoint.folder is at {folder!r}, and these saves need a file system that "
                    "renames. Nothing was saved; give a path, or leave save_with_residency out."
                )
        self._is_loading = False
        self._damaged: set[int] = set()
        super().__init__(config, **parts)
        if self.enable and self.async_mode != _AsyncMode.DISABLED:
            self.stager = PinnedStager(spare=config.spare)

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: Any,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Writes a save of this library, as torchtitan's method of this name writes one of DCP's.

        Args:
            state_dict: The states.
            checkpoint_id: The directory that becomes the save; one of the step goes afterwards.
            async_mode: Decides which futures are returned.
            enable_garbage_collection: Whether to collect afterwards.
            to_hf: Whether torchtitan itself is to write it, for Hugging Face.
        """
        if to_hf:
            return super().dcp_save(
                state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf
            )
        make_folders(SYSTEM, Path(checkpoint_id).absolute().parent)
        writer = ResidencyStorageWriter(checkpoint_id, overwrite=True)
        saving: Any = None
        if async_mode == _AsyncMode.DISABLED:
            save(state_dict, storage_writer=writer)
        else:
            saving = async_save(
                state_dict,
                storage_writer=writer,
                process_group=self.pg,
                async_stager=self.stager,
            )
        if enable_garbage_collection:
            gc.collect(1)  # as torchtitan does, whose trainer switches the collector off
        return saving.upload_completion if async_mode == _AsyncMode.ASYNC else saving

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Reads a save of this library, or lets torchtitan read its own checkpoint.

        Args:
            state_dict: The state that is filled.
            checkpoint_id: The checkpoint's directory.
            from_hf: Whether it is one of Hugging Face's.
            from_quantized: Whether that is quantized.
        """
        folder = Path(checkpoint_id)
        is_ours = (folder / MANIFEST).is_file() or bool(CheckpointDirectory(folder).steps())
        if from_hf or not is_ours:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        load(state_dict, storage_reader=ResidencyStorageReader(folder))
        if _MODEL in self.states:  # torchtitan's, too, has the model's entries at the top
            self.states[_MODEL].load_state_dict(state_dict)

    def _load(self, step: int = -1) -> bool:
        self._is_loading = True
        try:
            while True:
                try:
                    return bool(super()._load(step))
                except CheckpointException as error:
                    if step != -1 or not self._pass_over(error):
                        raise
        finally:
            self._is_loading = False

    def _pass_over(self, error: CheckpointException) -> bool:
        """Returns whether a newest save that is damaged leaves an older one to load."""
        causes = [each[0] for each in error.failures.values()]
        newest = self._find_load_step()
        if newest == -1 or not any(isinstance(each, CorruptSaveError) for each in causes):
            return False
        self._damaged.add(newest)
        older = self._find_load_step()
        if older in (-1, newest):
            return False
        warn(f"the save of step {newest} is damaged, so step {older} is loaded: {causes[0]}")
        return True

    def _find_load_step(self, folder: str = "") -> int:
        found: int = super()._find_load_step(folder)  # of those that torchtitan wrote
        ours = CheckpointDirectory(folder or self.folder).steps()
        return max([found, *(step for step in ours if step not in self._damaged)])

    def _create_checkpoint_id(self, step: int, folder: str = "") -> str:
        """Returns where a step is to be saved, or, during a load, where it is."""
        directory = CheckpointDirectory(folder or self.folder)
        if not self._is_loading:
            return str(directory.path / f"step-{step:08d}")
        if step in directory.steps() and step not in self._damaged:
            return str(directory.folder(step))
        theirs: str = super()._create_checkpoint_id(step, folder)
        return theirs

    def _states_to_load(self, model_only: bool) -> dict[str, Any]:
        states: dict[str, Any] = super()._states_to_load(model_only)
        container = states.get(_OPTIMIZER)
        if container is not None and PlainOptimizers.takes(container):
            states[_OPTIMIZER] = PlainOptimizers(container)
        return states

    def _save_last_step(self, curr_step: int) -> None:
        if not self.last_save_model_only or self.last_save_in_hf:
            super()._save_last_step(curr_step)
            return
        model = self.states[_MODEL].state_dict()
        self.dcp_save(
            {name: _in_dtype(value, self.export_dtype) for name, value in model.items()},
            checkpoint_id=self._create_checkpoint_id(curr_step),
            async_mode=_AsyncMode.DISABLED,
            enable_garbage_collection=True,
        )

    def _maybe_wait_for_staging(self) -> None:
        """Does nothing: the next write waits for the copies, on the device."""
        self.staging_future = None

    def _wait_for_saving(self) -> None:
        saving, self.save_future = self.save_future, None  # so that a failure is raised once
        if saving is not None:
            saving.result()

    def _purge_stale_checkpoints(self) -> None:
        """Removes what is beyond ``keep_latest_k``, once the save under way is published."""
        if not self._should_purge():
            return
        if self.save_future is None:
            self._retain()
        else:
            self.save_future = _followed(self.save_future, self._retain)

    def _retain(self) -> None:
        directory = CheckpointDirectory(self.folder)
        try:
            directory.apply(Retention(newest=self.keep_latest_k))
        except (CheckpointError, RefusedError) as error:  # the save itself is published
            _logger.warning("older checkpoints stay in %s: %s", self.folder, str(error))
        ours = len(directory.steps())
        theirs = sorted(_written_by_torchtitan(directory.path))
        for _, folder in theirs[: max(0, len(theirs) - max(0, self.keep_latest_k - ours))]:
            self.purge_queue.put(str(folder))

    def _close(self) -> None:
        try:
            self.maybe_wait_for_saving()
        finally:
            super()._close()


def _followed(saving: Future[Any], action: Callable[[], None]) -> Future[Any]:
    """Returns a future that is done once what follows a save is, too, or the save failed."""
    followed: Future[Any] = Future()

    def follow(saved: Future[Any]) -> None:
        error = saved.exception()
        try:
            if error is None:
                action()
        except Exception as failure:  # raised where the future is asked for its result
            error = failure
        if error is None:
            followed.set_result(saved.result())
        else:
            followed.set_exception(error)

    saving.add_done_callback(follow)
    return followed


def _written_by_torchtitan(folder: Path) -> list[tuple[int, Path]]:
    """Returns the checkpoints that torchtitan's own manager would find, with their steps."""
    found = []
    for path in folder.glob("step-*"):
        number = path.name.removeprefix("step-")
        marks = (".metadata", "model.safetensors.index.json")
        if number.isdecimal() and any((path / mark).is_file() for mark in marks):
            found.append((int(number), path))
    return found


def _in_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Returns a value as the last save has it; one of another dtype is made on the host."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype == dtype:
        return value
    return remade(value, lambda local: local.cpu().to(dtype))
