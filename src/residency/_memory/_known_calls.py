"""Gives a script that names no phases some: calls of torch and of frameworks that all scripts make.

The optimizer's step through torch's own hooks for it, the others by putting a function around
them, also in modules that are imported later. Everything is taken back by `stop`; a function that
other code has put another around by then stays, and does nothing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from residency._memory._imports import ImportWatch
from residency._memory._passes import Passes
from residency._memory._phase import begin_phase, end_phase, open_phases, phase

OPTIMIZER_STEP = "optimizer_step"
_OPTIMIZER = str(sys.modules[Optimizer.__module__].__file__)
# module -> (name in it, phase)
_CALLS: dict[str, tuple[tuple[str, str], ...]] = {
    "torch": (("save", "save"), ("load", "load")),
    "torch.distributed.checkpoint": (("save", "save"), ("async_save", "save"), ("load", "load")),
    "residency._checkpoint._checkpointer": (
        ("Checkpointer.save", "save"),
        ("Checkpointer.restore", "load"),
    ),
    "safetensors.torch": (
        ("save_file", "save"),
        ("save_model", "save"),
        ("load_file", "load"),
        ("load_model", "load"),
    ),
    "transformers.modeling_utils": (
        ("PreTrainedModel.from_pretrained", "load"),
        ("PreTrainedModel.save_pretrained", "save"),
    ),
    "transformers.generation.utils": (("GenerationMixin.generate", "generate"),),
    "transformers.trainer": (("Trainer.evaluate", "evaluate"), ("Trainer.predict", "evaluate")),
    "peft.peft_model": (
        ("PeftModel.from_pretrained", "load"),
        ("PeftModel.save_pretrained", "save"),
    ),
    "accelerate.accelerator": (
        ("Accelerator.save_state", "save"),
        ("Accelerator.load_state", "load"),
    ),
    **dict.fromkeys(
        ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer"),
        (
            ("Trainer.validate", "evaluate"),
            ("Trainer.test", "evaluate"),
            ("Trainer.save_checkpoint", "save"),
        ),
    ),
}
# As above, of a recording: a dry run, which goes on where a script loads, names passes itself.
_RECORDED_CALLS: dict[str, tuple[tuple[str, str], ...]] = {
    "transformers.trainer": (
        ("Trainer._load_best_model", "load"),
        ("Trainer._load_from_checkpoint", "load"),
    ),
    "transformers.integrations.peft": (("PeftAdapterMixin.load_adapter", "load"),),
    "peft.peft_model": (("PeftModel.load_adapter", "load"),),
}


class KnownCalls:
    """The phases that come from calls of libraries, while it is started."""

    def __init__(self, *, is_recording: bool = False) -> None:
        """Prepares; nothing is changed until `start`.

        Args:
            is_recording: Make phases of passes, too, and of the loads of single adapters.
        """
        self._is_on = False
        self._undo: list[Callable[[], object]] = []
        self._passes = Passes(self._put) if is_recording else None
        recorded = _RECORDED_CALLS if is_recording else {}
        calls = {
            name: (*_CALLS.get(name, ()), *recorded.get(name, ()))
            for name in {**_CALLS, **recorded}
        }
        self._watch = ImportWatch(
            {name: functools.partial(self._wrap_all, these) for name, these in calls.items()}
        )

    def start(self) -> None:
        """Puts the functions in place."""
        self._is_on = True
        self._undo += [
            register_optimizer_step_pre_hook(self._before_step).remove,
            register_optimizer_step_post_hook(self._after_step).remove,
        ]
        if self._passes is not None:
            self._passes.start()
        self._watch.start()

    def stop(self) -> None:
        """Takes everything back."""
        self._is_on = False
        if self._passes is not None:
            self._passes.stop()
        self._watch.stop()
        while self._undo:
            self._undo.pop()()

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if self._passes is not None:
            self._passes.end_forward()
        # The hook after a step that raises does not run: torch's frame that calls this one tells,
        # if by way of a frame that is done before the step begins.
        caller = sys._getframe(1)
        near = [each for each in (caller, caller.f_back) if each is not None]
        torchs = (each for each in near if each.f_code.co_filename == _OPTIMIZER)
        begin_phase(OPTIMIZER_STEP, optimizer, frame=next(torchs, caller))

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if any(visit._owner is optimizer for visit in open_phases()):
            end_phase(optimizer, None)

    def _wrap_all(self, calls: tuple[tuple[str, str], ...], module: ModuleType) -> None:
        for path, name in calls:
            *owners, attribute = path.split(".")
            owner: Any = module
            for part in owners:
                owner = getattr(owner, part)
            # As it is stored, so that a class method stays one.
            found = vars(owner).get(attribute)
            if found is not None:
                self._put(owner, attribute, found, self._around(found, name))

    def _put(self, owner: object, attribute: str, found: object, wrapped: object) -> None:
        def take_back() -> None:
            if vars(owner).get(attribute) is wrapped:
                setattr(owner, attribute, found)

        setattr(owner, attribute, wrapped)
        self._undo.append(take_back)

    def _around(self, found: Any, name: str) -> Any:
        if isinstance(found, classmethod | staticmethod):
            return type(found)(self._around(found.__func__, name))

        @functools.wraps(found)
        def called(*args: Any, **kwargs: Any) -> Any:
            visits = open_phases()
            if not self._is_on or (visits and visits[-1].name == name):  # one call made of others
                return found(*args, **kwargs)
            with phase(name):
                return found(*args, **kwargs)

        return called
