"""Checkpoints of a `Trainer` that are written while training goes on.

A draft is a checkpoint's directory under another name, in which stock code leaves all small files
at once; the tensors are captured, and a thread writes them, with stock code too, gives the
directory its name, and removes what `save_total_limit` does not keep. Invariant, which
``tests/integrations/test_transformers.py`` tries to break: a directory that is called
``checkpoint-...`` is complete, whenever the process dies.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from residency import _pinned
from residency._checkpoint import check_count
from residency._checkpoint._capture import Capture, capture_described, describe, tree_of
from residency._checkpoint._disk import SYSTEM, make_folders, sync_folder
from residency._errors import InvalidArgumentError
from residency._storages import storage_key
from residency._transfer import SlabArena, memory_of
from residency.integrations._common._framework import named_with_version
from residency.integrations._common._ordered_writes import OrderedWrites
from residency.integrations.transformers._adapter import is_peft_model

if TYPE_CHECKING:
    from residency._checkpoint import Snapshot

DRAFTS = ".residency-saving"
# Kinds of adapters whose files PEFT makes of the state dict that it is given, and of nothing else.
_MADE_OF_STATE = frozenset({"IA3", "LOHA", "LOKR", "LORA"})


def save_pretrained(snapshot: Snapshot, directory: Any, *, model: Any, **settings: Any) -> None:
    """Writes a snapshot of a model in the files that stock ``from_pretrained`` reads.

    Args:
        snapshot: The result of ``residency.snapshot(model)``.
        directory: The directory that ``model.save_pretrained`` is to write.
        model: The model of the snapshot: it brings the configuration, and is not
            read otherwise.
        settings: More for ``model.save_pretrained``.

    Raises:
        InvalidArgumentError: The snapshot is not one of this model. Nothing was written.
    """
    values = snapshot.tree
    names = set(model.state_dict())
    if not isinstance(values, Mapping) or set(values) != names:
        found = set(values) if isinstance(values, Mapping) else {type(values).__name__}
        odd = ", ".join(map(repr, sorted(map(str, found ^ names))[:5]))
        raise InvalidArgumentError(
            f"the snapshot is not one of this {type(model).__name__} of"
            f" {named_with_version('transformers')}: {odd} is in one of them only. Pass the"
            " result of residency.snapshot(model)."
        )
    model.save_pretrained(directory, state_dict=dict(values), **settings)


class _Taken(NamedTuple):
    """A captured state, and the call that writes it."""

    captured: Capture
    write: Callable[[object], None]


class Draft:
    """A checkpoint that has not got its name yet.

    Attributes:
        root: Stands for the trainer's output directory while stock code fills the draft.
        folder: The checkpoint's directory, in it.
        final: What it will be called.
    """

    def __init__(self, run_dir: Path, name: str, arenas: list[SlabArena] | None = None) -> None:
        """Takes an arena out of those that are free, if they are given, until it is dropped."""
        self.root = run_dir / DRAFTS / name
        self.folder = self.root / name
        self.final = run_dir / name
        self._arenas = arenas
        self._arena = None if arenas is None else _free_of(arenas)
        self._taken: list[_Taken] = []

    def take(
        self,
        tree: object,
        write: Callable[[object], None],
        *,
        is_written_by_steps_alone: bool = False,
    ) -> None:
        """Captures a state tree as it is now; ``write`` gets it on the host, later.

        Args:
            tree: What is captured.
            write: Writes it.
            is_written_by_steps_alone: Whether the current stream need not wait for the copies:
                steps pass the gate, and ``on_save`` of a callback, which may swap weights, not.

        Raises:
            RefusedError: It has something without plain bytes, or the host has no room.
        """
        assert self._arena is not None, "a rank that does not save takes nothing"
        # What holds up a step, an optimizer's state that is lent, is written first.
        description = describe(tree)
        if not is_written_by_steps_alone:
            for name, leaf in description.leaves.items():
                description.leaves[name] = replace(leaf, is_early=leaf.lent is None)
        captured = capture_described(description, arena=self._arena)
        self._taken.insert(0, _Taken(captured, write))

    def write(self) -> None:
        """Writes what was taken, and gives the directory its name."""
        try:
            while self._taken:
                captured, write = self._taken[0]
                write(tree_of(captured, _own_storages(captured)))
                for held in captured.held:
                    held.check()
                self._taken.pop(0).captured.release()
            self._publish()
        finally:
            self.drop()

    def drop(self) -> None:
        """Gives back what was taken, and removes what is not published."""
        while self._taken:
            self._taken.pop().captured.release()
        if self._arenas is not None and self._arena is not None:
            self._arenas.append(self._arena)
            self._arena = None
        shutil.rmtree(self.root, ignore_errors=True)

    def _publish(self) -> None:
        for folder, _, names in os.walk(self.folder):
            for name in names:
                fd = SYSTEM.open(Path(folder, name), os.O_RDONLY)
                try:
                    SYSTEM.fsync(fd)
                finally:
                    SYSTEM.close(fd)
            sync_folder(SYSTEM, Path(folder))
        if self.final.exists():  # of a run before, as stock code overwrites it
            SYSTEM.rename(self.final, self.root / "replaced")
        SYSTEM.rename(self.folder, self.final)
        sync_folder(SYSTEM, self.final.parent)


def _own_storages(captured: Capture) -> dict[int, Tensor]:
    """Returns each block's bytes in a storage of its own: `torch.save` writes whole storages."""
    spans = {}
    for held in captured.held:
        final = held.final()
        if held.block.lent is None and final.numel():
            final = torch.frombuffer(memory_of(final), dtype=torch.uint8)
        spans[id(held.block)] = final
    return spans


class BackgroundSaves:
    """A writer of drafts in their order, a bounded number of them behind training."""

    def __init__(self, max_in_flight: int) -> None:
        check_count("max_in_flight", max_in_flight, least=0)
        self.max_in_flight = max_in_flight
        self._writes = OrderedWrites(max(1, max_in_flight))
        self._arenas: list[SlabArena] = []  # those that no draft has
        self._folders: set[Path] = set()

    def begin(self, run_dir: Path, name: str) -> Draft:
        """Waits until there is room for one more, and begins it.

        Raises:
            CheckpointError: An earlier one could not be written.
        """
        self._writes.make_room()
        self._writes.raise_failure()
        make_folders(SYSTEM, run_dir.absolute())
        return Draft(run_dir, name, self._arenas)

    def submit(self, draft: Draft, rotate: Callable[[], None]) -> None:
        """Queues a draft to be written, and then older checkpoints removed.

        Raises:
            CheckpointError: An earlier one could not be written; this one is under way.
        """
        self._folders.add(draft.root.parent)
        self._writes.write(draft.final, draft.write)
        self._writes.remove(f"what {draft.final} replaces", rotate)

    def drain(self) -> None:
        """Waits until everything is written.

        Raises:
            CheckpointError: Something could not be; said once.
        """
        self._writes.wait()
        self._writes.raise_failure()

    def close(self, *, beside: BaseException | None = None) -> None:
        """Waits until everything is written, and gives back thread and page-locked memory.

        Args:
            beside: An error that is on its way to the caller already.

        Raises:
            CheckpointError: Something could not be written, and there is no other error.
        """
        self._writes.close()
        pinned_bytes = sum(arena.pinned_bytes for arena in self._arenas)
        for arena in self._arenas:
            arena.is_reused = False
            arena.free_all()
        if self._arenas:
            self._arenas.clear()
            _pinned.give_back_pinned(pinned_bytes)
        for folder in self._folders:
            with suppress(OSError):  # another run of this directory saves
                folder.rmdir()
        self._folders.clear()
        self._writes.raise_failure(beside=beside)


def _free_of(arenas: list[SlabArena]) -> SlabArena:
    try:
        return arenas.pop()
    except IndexError:
        return SlabArena(reuse=True)


def model_to_take(model: nn.Module) -> tuple[Any, Callable[[Any], dict[str, Any]]] | None:
    """Returns what of a model a checkpoint needs, and what makes a state dict of its copy.

    Of a PEFT model that is adapters and what else is trained; its base goes along as it is.

    Returns:
        None where the files are not made of a state dict alone.
    """
    if not is_peft_model(model):
        return model, dict
    adapted: Any = model
    configurations = adapted.peft_config
    if any(each.peft_type not in _MADE_OF_STATE for each in configurations.values()):
        return None
    peft: Any = sys.modules["peft"]
    live: dict[str, Any] = adapted.state_dict()
    written = {
        storage_key(value)
        for name in configurations
        for value in peft.get_peft_model_state_dict(
            adapted, state_dict=live, adapter_name=name, save_embedding_layers=False
        ).values()
    }
    written |= {storage_key(p) for p in model.parameters() if p.requires_grad}
    taken = {
        name: value
        for name, value in live.items()
        if isinstance(value, Tensor) and storage_key(value) in written
    }
    return taken, lambda copied: {**live, **copied}


def clear_drafts(run_dir: Path) -> None:
    """Removes what a process left that died while it saved."""
    shutil.rmtree(run_dir / DRAFTS, ignore_errors=True)
