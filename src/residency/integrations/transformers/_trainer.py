"""What only a trainer's own methods can do: resume without the optimizer on the device, and save
while training goes on.

Every override calls the stock method, with something else in the place of what would take memory or
time: a draft's directory for the output directory, a note of the call for ``save_pretrained``, a
world of one process for where ``optimizer.pt`` is read to.
"""

from __future__ import annotations

import importlib
import logging
import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from residency._errors import RefusedError
from residency._memory import phase
from residency._ranks import has_ranks
from residency.integrations._common._framework import load_framework, missing_in
from residency.integrations.transformers._adapter import peft_models
from residency.integrations.transformers._callback import ResidencyCallback, optimizer_inside
from residency.integrations.transformers._saves import (
    BackgroundSaves,
    Draft,
    clear_drafts,
    model_to_take,
)

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object

_HOOKS = (
    "_get_output_dir",
    "_load_best_model",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_save",
    "_save_checkpoint",
    "_save_optimizer_and_scheduler",
)
_OPTIMIZER_FILE = "optimizer.pt"
_STATE_FILE = "trainer_state.json"
_log = logging.getLogger("residency")


class ResidencyTrainerMixin(_Trainer):  # type: ignore[misc]  # is not analysed: too large
    """A mixin before a trainer class: ``class MyTrainer(ResidencyTrainerMixin, Trainer): ...``.

    It has a `ResidencyCallback`, one of its own unless ``callbacks`` has one, and adds the parts a
    callback cannot reach. ``optimizer.pt`` is read on the host, on every rank, into an optimizer
    that is offloaded already. ``checkpoint-...`` directories are written while training goes on,
    with the files of stock ones, and get their names when they are complete. Every phase is one
    through which errors pass, so that an out-of-memory error gets its note.

    Saves go the stock way, with a line in the log, if the files are not made of a state dict
    alone: DeepSpeed, FSDP, a hyperparameter search, ``push_to_hub``; and on several machines, which
    may share no directory, without ``save_on_each_node``.

    Args:
        max_in_flight: Checkpoints that may be under way at once; 0 writes them before training
            goes on.

    Raises:
        RefusedError: The trainer class lacks a method that this overrides. Nothing was made.

    Memory:
        Device: none for a save. Host: for each save that may be under way, page-locked, the bytes
        of the device's tensors in its files, each rounded up to 512, plus the unused end of
        each slab; kept until training ends. The state of an offloaded optimizer is lent, not
        copied.
    """

    args: Any
    model: Any
    optimizer: Any

    def __init__(self, *args: Any, max_in_flight: int = 1, **kwargs: Any) -> None:
        for name in _HOOKS if _rotation() else (*_HOOKS, "_rotate_checkpoints"):
            if not callable(getattr(super(), name, None)):
                raise missing_in(
                    "transformers",
                    f"Trainer.{name}",
                    "put the mixin before a Trainer class, or use ResidencyCallback alone",
                )
        self._residency_saves = BackgroundSaves(max_in_flight)
        self._residency_draft: Draft | None = None
        super().__init__(*args, **kwargs)
        own = [c for c in self.callback_handler.callbacks if isinstance(c, ResidencyCallback)]
        if not own:
            own = [ResidencyCallback()]
            self.add_callback(own[0])
            own[0].on_init_end(self.args, self.state, self.control, model=self.model)
        self._residency_callback = own[0]

    # Training.

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains as the trainer does; returns when the last checkpoint is written.

        Raises:
            CheckpointError: A checkpoint could not be written; said once.
        """
        if self.args.should_save:
            clear_drafts(Path(self.args.output_dir))
        self._meet()
        try:
            with phase("train"):
                result = super().train(*args, **kwargs)
        except BaseException as error:
            self._residency_saves.close(beside=error)
            raise
        self._residency_saves.close()
        return result

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates as the trainer does, in a phase of its own."""
        with phase("evaluate"), self._residency_callback.parked(self.optimizer):
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predicts as the trainer does, with the room that an evaluation has."""
        with self._residency_callback.parked(self.optimizer):
            return super().predict(*args, **kwargs)

    # Loading.

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        self._residency_saves.drain()
        with phase("load"):
            return super()._load_from_checkpoint(*args, **kwargs)

    def _load_best_model(self) -> Any:
        self._residency_saves.drain()
        self._meet()  # the rank that writes has
        with phase("load"):
            return super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> Any:
        if checkpoint is None:
            return super()._load_optimizer_and_scheduler(checkpoint)
        self._residency_callback.offload(self.optimizer)
        args = self.args
        self.args = _AsOneProcess(args)
        try:
            with phase("load"), _mapped(Path(checkpoint) / _OPTIMIZER_FILE):
                result = super()._load_optimizer_and_scheduler(checkpoint)
        finally:
            self.args = args
        _copy_out(optimizer_inside(self.optimizer))
        return result

    # Saving.

    def _get_output_dir(self, trial: Any) -> str:
        """Returns the draft's, while one is filled; else all that is to be in it is."""
        if self._residency_draft is not None:
            return str(self._residency_draft.root)
        self._residency_saves.drain()
        return str(super()._get_output_dir(trial))

    def _save_checkpoint(self, model: Any, trial: Any, *args: Any, **kwargs: Any) -> None:
        with phase("save"):
            if not self._can_save_behind(trial):
                super()._save_checkpoint(model, trial, *args, **kwargs)
                return
            run_dir = str(super()._get_output_dir(trial))
            name = f"checkpoint-{self.state.global_step}"
            is_writer = self.args.should_save
            saves = self._residency_saves
            begin = saves.begin if is_writer else Draft
            self._residency_draft = draft = begin(Path(run_dir), name)
            try:
                super()._save_checkpoint(model, trial, *args, **kwargs)
                self._name_best(draft, run_dir)
            except BaseException:
                if is_writer:
                    draft.drop()
                raise
            finally:
                self._residency_draft = None
            self._meet()  # every rank has left its files in the draft
            # A signal may have asked for it: stock code has put a mark into a directory of its
            # name, and takes it off when this returns.
            is_awaited = bool(vars(self.args).get("enable_jit_checkpoint"))
            try:
                if is_writer:
                    best = self.state.best_model_checkpoint
                    saves.submit(draft, lambda: self._remove_older(run_dir, best))
                    if is_awaited:
                        saves.drain()
            finally:
                if is_awaited:
                    self._meet()  # each rank takes the mark off

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        found = None
        if self._is_in_draft(output_dir) and _saves_itself(self.model):
            found = model_to_take(self.model)
        if found is None or state_dict is not None:
            super()._save(output_dir, state_dict)
            return
        taken, to_state_dict = found
        with _noted_saves(self.model) as noted:
            super()._save(output_dir, state_dict)

        def write(tree: Any) -> None:
            for directory, kwargs in noted:
                values = to_state_dict(tree["model"])  # anew, as the call takes out what it wrote
                self.model.save_pretrained(directory, **{**kwargs, "state_dict": values})

        # A trainer with a `_save` of its own may call it never, or for several directories.
        if noted and not self._take({"model": taken}, write):
            for directory, kwargs in noted:
                self.model.save_pretrained(directory, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer = self.optimizer
        path = Path(output_dir) / _OPTIMIZER_FILE
        if not self._is_in_draft(output_dir) or not self._take(
            {"optimizer": optimizer_inside(optimizer)},
            lambda tree: torch.save(tree["optimizer"], path),
            is_written_by_steps_alone=True,
        ):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        self.optimizer = _WithoutState()
        try:
            super()._save_optimizer_and_scheduler(output_dir)
        finally:
            self.optimizer = optimizer

    def _is_in_draft(self, output_dir: str | None) -> bool:
        """Returns whether a directory is that of a draft, which this rank fills."""
        draft = self._residency_draft
        if draft is None or output_dir is None or not self.args.should_save:
            return False
        return Path(output_dir) == draft.folder

    def _take(self, tree: Any, write: Callable[[Any], None], **how: bool) -> bool:
        """Captures a part of a draft; says whether that can be done."""
        assert self._residency_draft is not None
        try:
            self._residency_draft.take(tree, write, **how)
        except RefusedError as error:
            _log.warning(
                "a part of a checkpoint is written before training goes on: %s", str(error)
            )
            return False
        return True

    def _can_save_behind(self, trial: Any) -> bool:
        if self._residency_saves.max_in_flight == 0:
            return False
        reasons = {
            "DeepSpeed": self.is_deepspeed_enabled,
            "FSDP": self.is_fsdp_enabled,
            "a hyperparameter search": trial is not None or self.hp_search_backend is not None,
            "push_to_hub": self.args.push_to_hub,
            # Which may share no directory: only the rank that writes would publish a draft.
            "several machines": _is_on_several_machines() and not self.args.save_on_each_node,
        }
        found = [name for name, is_so in reasons.items() if is_so]
        if found:
            _log.warning("with %s, checkpoints are written before training goes on", found[0])
            self._residency_saves.max_in_flight = 0  # said once
        return not found

    def _name_best(self, draft: Draft, run_dir: str) -> None:
        """Names the best checkpoint as stock code does, which looked for it in the draft alone.

        The one in the draft gets the name that it will have; an older one is where this run's
        checkpoints are, which need not be where it was saved.
        """
        best = self.state.best_model_checkpoint
        if best is not None and Path(best) == draft.folder:
            found = os.path.join(run_dir, draft.folder.name)
        else:
            found = os.path.join(run_dir, f"checkpoint-{self.state.best_global_step}")
            if found == best or self.args.save_strategy == "no" or not os.path.isdir(found):
                return
        self.state.best_model_checkpoint = found
        if self.args.should_save:
            self.state.save_to_json(str(draft.folder / _STATE_FILE))

    def _remove_older(self, run_dir: str, best: str | None) -> None:
        """Rotates as stock code does after a save."""
        rotate = _rotation()
        if rotate is None:  # before 5.0 it is a method
            trainer: Any = self
            trainer._rotate_checkpoints(use_mtime=True, output_dir=run_dir)
            return
        rotate(
            output_dir=run_dir,
            save_total_limit=self.args.save_total_limit,
            best_model_checkpoint=best,
            use_mtime=True,
        )

    def _meet(self) -> None:
        if self.args.world_size > 1 and has_ranks():
            dist.barrier()


def _rotation() -> Any:
    """Returns the function that removes older checkpoints; None before transformers 5.0."""
    utilities = load_framework("transformers.trainer_utils", extra="transformers")
    return vars(utilities).get("rotate_checkpoints")


class _AsOneProcess:
    """The arguments of a trainer, for one process: stock code then reads to the host."""

    world_size = 1

    def __init__(self, args: Any) -> None:
        self._args = args

    def __getattr__(self, name: str) -> Any:
        return getattr(self._args, name)


class _WithoutState:
    """An optimizer whose state is written later."""

    def state_dict(self) -> dict[str, Any]:
        return {}


def _is_on_several_machines() -> bool:
    """Returns whether torchrun, or what sets the same variables, started ranks on others too."""
    on_this_one = os.environ.get("LOCAL_WORLD_SIZE")
    return on_this_one is not None and on_this_one != os.environ.get("WORLD_SIZE")


def _saves_itself(model: object) -> bool:
    """Returns whether a trainer leaves it to the model's ``save_pretrained`` to save it."""
    transformers: Any = load_framework("transformers", extra="transformers")
    # PEFT's class for adapters of several kinds at once has none that works.
    return isinstance(model, (transformers.PreTrainedModel, *peft_models()[:1]))


@contextmanager
def _noted_saves(model: Any) -> Iterator[list[tuple[Any, dict[str, Any]]]]:
    """Notes the calls of ``save_pretrained`` that are to write what the model has, for later.

    Those that bring values, or that might, are made at once.
    """
    noted: list[tuple[Any, dict[str, Any]]] = []
    own: dict[str, Any] = vars(model)
    before = own.get("save_pretrained")
    save = model.save_pretrained

    def note(save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs.get("state_dict") is not None:
            return save(save_directory, *args, **kwargs)
        noted.append((save_directory, kwargs))
        return None

    own["save_pretrained"] = note
    try:
        yield noted
    finally:
        del own["save_pretrained"]
        if before is not None:
            own["save_pretrained"] = before


@contextmanager
def _mapped(path: Path) -> Iterator[None]:
    """Makes `torch.load` map files: ranks of one machine then share the pages of one."""
    config: Any = importlib.import_module("torch.utils.serialization.config")
    with config.patch({"load.mmap": path.is_file() and zipfile.is_zipfile(path)}):
        yield


def _copy_out(optimizer: Any) -> None:
    """Copies what still lies in a mapped file, which may be removed while training goes on."""
    for values in optimizer.state.values():
        if type(values) is not dict:  # an offloaded optimizer's, which copies
            continue
        for key, value in values.items():
            if isinstance(value, Tensor) and value.is_cpu:
                values[key] = value.clone()
