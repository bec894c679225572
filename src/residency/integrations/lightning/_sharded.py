"""What a strategy needs that saves shards itself and so passes every ``CheckpointIO`` by."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save

from residency._checkpoint._disk import SYSTEM, make_folders
from residency._errors import CheckpointError
from residency._optim import OffloadedOptimizer
from residency._ranks import failures_of_ranks, has_ranks
from residency._transfer import SlabArena
from residency.integrations._common._framework import missing_in
from residency.integrations._common._ordered_writes import OrderedWrites
from residency.integrations.lightning._checkpoint_io import make_parent_of, phase_unless_inside
from residency.integrations.lightning._freeze import Frozen, freeze
from residency.integrations.lightning._trees import error_of_training, trees_in_use
from residency.integrations.lightning._whole_files import named_when_whole

_OVERRIDDEN = (
    "lightning_module_state_dict",
    "optimizer_state",
    "save_checkpoint",
    "load_checkpoint",
    "remove_checkpoint",
    "teardown",
)
_METADATA = "meta.pt"  # by which Lightning knows a directory as a checkpoint
# How each strategy says that it saves shards, and the key under which it saves those of the model.
_FORMS: dict[str, tuple[Any, str]] = {
    "_save_distributed_checkpoint": (True, "state_dict"),
    "_state_dict_type": ("sharded", "model"),
}
_LIVE = StateDictOptions(full_state_dict=False, cpu_offload=False)


class ResidencyShardedStrategy:
    """A mixin for strategies: they save their shards in the background, without device memory.

    ``class Strategy(ResidencyShardedStrategy, ModelParallelStrategy): pass``, then
    ``Trainer(strategy=Strategy())``. The files have the strategy's own form, and the strategy
    without the mixin can read them. Sharded checkpoints only: a whole one, with
    ``save_distributed_checkpoint=False`` or ``state_dict_type="full"``, goes the strategy's own
    way, which ends at the ``CheckpointIO``.

    Saves, loads, removals and failures are as with ``ResidencyCheckpointIO``; a failure on one rank
    is raised on all. With ``ResidencyCallback`` the state of the optimizers is on the host before a
    load, and goes from the disk to its home there.

    With ``FSDPStrategy`` (FSDP1) the write alone is in the background: FSDP gathers its shards and
    copies them to the host itself, at the call.

    Args:
        *args: The strategy's own arguments.
        max_in_flight: How many saves may be under way; on each rank the same.
        **kwargs: The strategy's own arguments.

    Raises:
        InvalidArgumentError: ``max_in_flight`` is no whole number of at least 1.
        RefusedError: The strategy's version lacks a method that this class needs.

    Memory:
        Device: none. Host: ``max_in_flight`` times the bytes of this rank's shards, page-locked;
        state of an offloaded optimizer is lent instead.
    """

    model: Any
    optimizers: Any
    broadcast: Any

    def __init__(self, *args: Any, max_in_flight: int = 1, **kwargs: Any) -> None:
        """Makes the strategy."""
        self._writes = OrderedWrites(max_in_flight)
        super().__init__(*args, **kwargs)
        self._arena: SlabArena | None = None
        self._groups: list[Any] = []
        stock: Any = super()
        missing = [name for name in _OVERRIDDEN if not callable(getattr(stock, name, None))]
        if missing or vars(self).keys().isdisjoint(_FORMS):
            what = missing[0] if missing else "sharded checkpoint"
            raise missing_in(
                trees_in_use()[0].distribution,
                f"{what} in the classes below {type(self).__name__}",
                "put ResidencyShardedStrategy before ModelParallelStrategy or FSDPStrategy",
            )

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the shards on their device; the strategy itself copies them to the host."""
        if self._key_of_model == "state_dict":
            return get_model_state_dict(self.model, options=_LIVE)
        stock: Any = super()
        found: dict[str, Any] = stock.lightning_module_state_dict()
        return found

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Returns the shards on their device; the strategy itself copies them to the host."""
        if self._key_of_model == "state_dict":
            inner = vars(optimizer).get("_optimizer", optimizer)  # of Lightning's wrapper
            return get_optimizer_state_dict(self.model, inner, options=_LIVE)
        stock: Any = super()
        found: dict[str, Any] = stock.optimizer_state(optimizer)
        return found

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Begins a save; returns when the copies to the host are queued.

        Raises:
            CheckpointError: An earlier write failed on some rank, and this save is begun all the
                same; or another rank refuses this save, and it is begun on none.
            RefusedError: Something in the checkpoint cannot be pickled, or the host has no room.
        """
        key = self._key_of_model
        if key is None or storage_options is not None:
            stock: Any = super()
            stock.save_checkpoint(checkpoint, filepath, storage_options)
            return
        with phase_unless_inside("save"):
            path = Path(self.broadcast(filepath))
            self._writes.make_room()
            if self._arena is None:
                self._arena = SlabArena(reuse=True)
            if not self._groups:
                # One for each thread: collectives of two in one group would meet in any order.
                self._groups = [dist.new_group(backend="gloo") for _ in range(2)]
            of_calls, of_writes = self._groups
            frozen = _freeze_on_all(checkpoint, self._arena, of_calls)
            make_parent_of(path)
            self._writes.write(path, functools.partial(_write, frozen, key, path, of_writes))

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Loads as the strategy does, once all writes are done.

        Raises:
            CheckpointError: A write failed, and no call has raised that yet.
        """
        stock: Any = super()
        with phase_unless_inside("load"):
            self._writes.wait()
            self._writes.raise_failure()
            for optimizer in self.optimizers:
                if isinstance(optimizer, OffloadedOptimizer):
                    optimizer.prime()  # the strategy reads into the state that there is
            return stock.load_checkpoint(checkpoint_path, *args, **kwargs)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a checkpoint, after the writes that were begun before."""
        stock: Any = super()
        self._writes.remove(filepath, functools.partial(stock.remove_checkpoint, filepath))

    def teardown(self) -> None:
        """Finishes all writes, and gives the host memory back.

        Raises:
            CheckpointError: A write failed, and no call has raised that yet. If an error of
                training is the reason for the end, that error gets it as a note.
        """
        self._writes.close()
        self._arena, groups, self._groups = None, self._groups, []
        for group in groups if has_ranks() else ():
            dist.destroy_process_group(group)
        stock: Any = super()
        stock.teardown()
        self._writes.raise_failure(beside=error_of_training())

    @property
    def _key_of_model(self) -> str | None:
        """The key under which the strategy saves a model's shards; None of a whole one."""
        return next((k for n, (v, k) in _FORMS.items() if vars(self).get(n) == v), None)


class _PageableLoadPlanner(DefaultSavePlanner):
    """A plan in which no tensor is page-locked: FSDP1 would make such ones on the device."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.pin_memory = False
        return plan


def _freeze_on_all(checkpoint: dict[str, object], arena: SlabArena, group: object) -> Frozen:
    """Freezes on all ranks or on none: one alone would leave the others in their collectives."""
    frozen: Frozen | None = None
    failure: Exception | None = None
    try:
        frozen = freeze(checkpoint, arena=arena)
    except Exception as error:
        failure = error
    _agree(failure, group)
    assert frozen is not None, "a rank that failed has raised"
    return frozen


def _write(frozen: Frozen, key: str, path: Path, group: Any) -> None:
    """Writes this rank's shards, in the form of the strategy's own ``save_checkpoint``."""
    failure: Exception | None = None
    try:
        checkpoint = frozen.thaw()
        state = {key: checkpoint.pop("state_dict")}
        for index, values in enumerate(checkpoint.pop("optimizer_states", [])):
            state[f"optimizer_{index}"] = values
        if path.is_file():
            path.unlink(missing_ok=True)
        make_folders(SYSTEM, path.absolute())
        if dist.get_rank() == 0:
            (path / _METADATA).unlink(missing_ok=True)  # of shards that are about to be others
    except Exception as error:
        failure = error
    _agree(failure, group)
    try:
        save(state, checkpoint_id=path, planner=_PageableLoadPlanner(), process_group=group)
        frozen.check()
    except Exception as error:
        failure = error
    _agree(failure, group)
    try:
        if dist.get_rank() == 0:
            with named_when_whole(path / _METADATA) as draft:
                torch.save(checkpoint, draft)  # last: from now on it is a checkpoint
    except Exception as error:
        failure = error
    _agree(failure, group)


def _agree(failure: Exception | None, group: Any) -> None:
    """Raises on all ranks when one has failed."""
    found = failures_of_ranks(None if failure is None else repr(failure), group=group)
    if failure is not None:
        raise failure
    for rank, each in found.items():
        raise CheckpointError(f"rank {rank} failed: {each}")
