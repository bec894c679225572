"""The plugin that saves in the background in the place of Lightning's ``AsyncCheckpointIO``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from residency import _device, _pinned
from residency._checkpoint._disk import SYSTEM, make_folders
from residency._errors import CheckpointError, InvalidArgumentError, RefusedError
from residency._memory import open_phases, phase
from residency._nesting import call_under_way, half_done, refuse_inside
from residency._ranks import all_ranks
from residency._transfer import SlabArena
from residency.integrations._common._ordered_writes import OrderedWrites
from residency.integrations.lightning._freeze import Frozen, freeze
from residency.integrations.lightning._trees import (
    error_of_training,
    in_trees,
    kind_of,
    made_again,
    trees_in_use,
    version_of,
)
from residency.integrations.lightning._whole_files import local_path, named_when_whole


class ResidencyCheckpointIO:
    """A plugin for Lightning's Trainer that saves in the background, without device memory.

    ``Trainer(plugins=[ResidencyCheckpointIO()])``; of the class tree that is imported when it is
    made, ``lightning`` or ``pytorch_lightning``, or of both. The files are written by the plugin to
    which this one hands the checkpoint, by default Lightning's own; their tensors are host tensors.
    A local file of Lightning's own has its name once it is whole and on the disk: a write that
    fails, or whose process dies, leaves the file that had the name before.

    A save returns when the copies to the host are queued. Its tensors stay as they were, whatever
    the current stream does then; state of an offloaded optimizer is lent, and a write into it in
    place, which is no step and no assignment, fails the save. The next save waits for room; a load
    waits for all writes; a removal comes after the writes before it. A write that fails is raised
    once, as a ``CheckpointError``: by the next save, which is begun all the same, by the next
    load, by ``wait``, or by ``teardown``, with which each of ``fit``, ``validate``, ``test`` and
    ``predict`` ends. Removals between the failure and that call are left out, since they might
    remove the last checkpoint.

    Args:
        checkpoint_io: The plugin that writes, loads and removes; Lightning's own by default.
        max_in_flight: How many saves may be under way.

    Raises:
        InvalidArgumentError: ``checkpoint_io`` is no ``CheckpointIO`` of a tree that is in use, or
            ``max_in_flight`` is no whole number of at least 1.
        RefusedError: ``checkpoint_io`` saves in the background itself.
        ImportError: Neither tree is installed.

    Memory:
        Device: none. Host: ``max_in_flight`` times the checkpoint's bytes, page-locked, each
        storage once; state of an offloaded optimizer is lent instead, and its next step moves to a
        second set of homes. The memory of the plugin that writes comes on top: Lightning's own
        makes the file's bytes in memory first.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes an instance of the classes that the imported trees check for."""
        hooks = ("save_checkpoint", "load_checkpoint", "remove_checkpoint", "teardown")
        made: Any = in_trees(cls, "checkpoint_io", *hooks)
        return object.__new__(made)

    def __init__(self, checkpoint_io: Any = None, *, max_in_flight: int = 1) -> None:
        """Checks what is given; starts nothing."""
        self._writes = OrderedWrites(max_in_flight)
        self._base = _base_io(checkpoint_io)
        self._arena: SlabArena | None = None

    def __reduce__(self) -> Any:
        """Makes another one, with nothing under way, where a launcher copies the Trainer."""
        state = {**vars(self), "_writes": self._writes.max_in_flight, "_arena": None}
        return made_again, (kind_of(self),), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes what ``__reduce__`` gave."""
        vars(self).update(state | {"_writes": OrderedWrites(state["_writes"])})

    @property
    def checkpoint_io(self) -> Any:
        """The plugin that writes."""
        return self._base

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Begins a save; returns when the copies to the host are queued, before the file is there.

        Inside another call of this plugin, for example in a handler of a signal that saves
        (Lightning's own, if Slurm requeues a job), it returns when the file is there.

        Raises:
            CheckpointError: An earlier write failed; this save is begun all the same.
            RefusedError: Something in the checkpoint cannot be pickled, or the host has no room;
                or the save is inside of another call, and a file of this name is on its way.
        """
        with phase_unless_inside("save"):
            if call_under_way(self) is None and not self._writes.is_current():
                self._begin(checkpoint, path, storage_options)
            elif self._writes.is_pending(path):
                refuse_inside(f"a save of {path}, which is still being written,", self)
            else:
                self._write_whole(checkpoint, path, storage_options)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Loads as the plugin that writes does, once all writes are done, on all ranks.

        If ``torch.distributed`` is in use, all ranks must load together, as strategies do: one
        of them alone has begun the writes.

        Raises:
            CheckpointError: A write failed, and no call has raised that yet.
        """
        with phase_unless_inside("load"):
            self._writes.wait()
            _meet_ranks()
            self._writes.raise_failure()
            return self._base.load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        """Removes a checkpoint, after the writes that were begun before."""
        self._writes.remove(path, functools.partial(self._base.remove_checkpoint, path))

    def wait(self) -> None:
        """Blocks until every write and removal is done.

        Raises:
            CheckpointError: One failed, and no call has raised that yet.
        """
        self._writes.wait()
        self._writes.raise_failure()

    def teardown(self) -> None:
        """Finishes all writes, ends the thread and gives the host memory back.

        Raises:
            CheckpointError: A write failed, and no call has raised that yet. If an error of
                training is the reason for the end, that error gets it as a note.
        """
        self._writes.close()
        if self._arena is not None:
            pinned_bytes = self._arena.pinned_bytes
            self._arena = None
            _pinned.give_back_pinned(pinned_bytes)
        self._base.teardown()
        self._writes.raise_failure(beside=error_of_training())

    @half_done("a save", of_object=True)
    def _begin(self, checkpoint: dict[str, Any], path: Any, storage_options: Any) -> None:
        self._writes.make_room()
        self._write(self._freeze(checkpoint), path, storage_options)

    def _freeze(self, checkpoint: dict[str, object]) -> Frozen:
        if self._arena is None:
            self._arena = SlabArena(reuse=True)
        return freeze(checkpoint, arena=self._arena)

    def _write(self, frozen: Frozen, path: Any, storage_options: Any) -> None:
        def write() -> None:
            self._write_whole(frozen.thaw(), path, storage_options, check=frozen.check)

        make_parent_of(path)
        self._writes.write(path, write)

    def _write_whole(
        self,
        checkpoint: Any,
        path: Any,
        storage_options: Any,
        *,
        check: Callable[[], object] = bool,
    ) -> None:
        """Lets the plugin write; a local file of Lightning's own gets its name when it is whole.

        Args:
            checkpoint: What is written.
            path: Where to.
            storage_options: For the plugin.
            check: Raises where what was written is not what it should be.
        """
        final = local_path(path)
        if final is not None and _writes_one_file(self._base):
            with named_when_whole(final) as draft:
                self._base.save_checkpoint(checkpoint, draft, storage_options=storage_options)
                check()
            return
        self._base.save_checkpoint(checkpoint, path, storage_options=storage_options)
        try:
            check()
        except CheckpointError:
            self._base.remove_checkpoint(path)  # a reader that finds it would trust it
            raise


def _writes_one_file(base: Any) -> bool:
    """Returns whether a plugin writes as Lightning's own does: a file, at the path that it gets."""
    return isinstance(base, tuple(tree.torch_checkpoint_io for tree in trees_in_use()))


def _meet_ranks() -> None:
    if all_ranks() is not None:
        is_nccl = dist.get_backend() == "nccl"  # which would guess the device, with a warning
        dist.barrier(device_ids=[_device.current_index()] if is_nccl else None)


def make_parent_of(path: Any) -> None:
    """Makes the local folder that a checkpoint is to be in, as a synchronous save would have.

    ``ModelCheckpoint(save_last="link")`` makes a link there right after the call. Where the folder
    cannot be made, the write fails, and says so.
    """
    place = local_path(path)
    if place is not None:
        with suppress(OSError):
            make_folders(SYSTEM, place.parent)


@contextmanager
def phase_unless_inside(name: str) -> Iterator[None]:
    """Names a phase, unless a recording has just begun one of this name around the call."""
    visits = open_phases()
    if visits and visits[-1].name == name:
        yield
    else:
        with phase(name):
            yield


def _base_io(given: Any) -> Any:
    trees = trees_in_use()
    if given is None:
        return trees[0].torch_checkpoint_io()
    if not isinstance(given, tuple(tree.checkpoint_io for tree in trees)):
        known = " or ".join(tree.distribution for tree in trees)
        raise InvalidArgumentError(
            f"checkpoint_io is a {type(given).__module__}.{type(given).__name__}; expected an"
            f" instance of a CheckpointIO of {known}, with {version_of(given)}."
        )
    names = {each.__name__ for each in type(given).__mro__}
    if names & {"AsyncCheckpointIO", "ResidencyCheckpointIO"}:
        raise RefusedError(
            f"checkpoint_io is a {type(given).__name__}, which saves in the background itself"
            f" ({version_of(given)}): writes would not be in order. Nothing was changed; give the"
            " plugin inside of it, or leave it out."
        )
    if getattr(given, "checkpoint_io", given) is None:  # a wrapper that a strategy would fill
        tree = next(tree for tree in trees if isinstance(given, tree.checkpoint_io))
        wrapper: Any = given
        wrapper.checkpoint_io = tree.torch_checkpoint_io()
    return given
