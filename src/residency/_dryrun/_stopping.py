"""Brings a script to its end after some optimizer steps: it need not make 10,000 of them.

Listeners at optimizers, loads (``_reaching``), loaders (``_loaders``) and trainers of frameworks
report to the reducer (``_steering``), which alone decides; ``_telling`` does what it says.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from residency._dryrun._histories import steps_to_fill
from residency._dryrun._loaders import Loaders
from residency._dryrun._loops import loops
from residency._dryrun._methods import Function, put_around
from residency._dryrun._places import line_of
from residency._dryrun._reaching import LoadsOfTrained
from residency._dryrun._resumes import TEMPLATE
from residency._dryrun._steering import Steering
from residency._dryrun._telling import Telling, parameters_of
from residency._dryrun._unseen import branches_left_out
from residency._dtensor import local_of
from residency._memory import ImportWatch, open_phases

_MOST_LOOPS = 4  # that the answer names


class Stopping(Telling):
    """The listener to a script's optimizers and to trainers of frameworks."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Begins at 0 steps, with the arguments of `Telling`."""
        super().__init__(*args, **options)
        self._loaders = Loaders(self)
        self._loads = LoadsOfTrained(self)

    def left_out(self) -> dict[str, object]:
        """Returns what was left out of the script, as the answer has it: the outermost loop first,
        with its rounds and how many of it are left, if that is known.
        """
        short, branches = self._loaders.short, branches_left_out(loops.cut, loops.entered)
        if self.state.was_ended:
            branches["thaws"] += self._thawing_callbacks()
        cut = list(loops.cut.items())[: -_MOST_LOOPS - 1 : -1]
        return {
            "loops": [
                {"line": line_of(*line), "rounds": num_rounds, "left": left}
                for line, (num_rounds, left) in cut
            ],
            **branches,
            "evaluations": self.state.num_cut,
            "data": short and {"samples": short[0], "batch": short[1]},
        }

    def _thawing_callbacks(self) -> list[str]:
        """Returns the classes of Lightning's callbacks that train more layers from an epoch on."""
        found = []
        for trainer in list(self.trainers):
            for callback in trainer.callbacks:
                names = [each.__name__ for each in type(callback).__mro__]
                found += [names[0]] if "BaseFinetuning" in names else []
        return found

    @property
    def was_cut(self) -> bool:
        """Whether a training was ended before its time: one whose loops had no further round, and
        that no framework or loader ends, came to its own end.
        """
        state = self.state
        is_shortened = loops.cut or state.have_ended or state.num_cut
        return state.was_ended and bool(is_shortened or state.has_framework or state.was_left)

    def unstepped_bytes(self) -> int:
        """Returns the bytes of parameters on the device that an optimizer has, and that none has
        stepped: their gradients and states may be still to come.
        """
        stepped = set(map(id, parameters_of(list(self.stepped))))
        rest = {id(each): each for each in parameters_of(list(self._optimizers))}
        found = [local_of(rest[key]) for key in rest.keys() - stepped if not is_lazy(rest[key])]
        return sum(each.nbytes for each in found if each.is_cuda and each.requires_grad)

    def start(self) -> None:
        """Counts from now on."""
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        if not self.state.wanted:
            return
        self._watch_optimizers()
        self._loaders.start()
        self._loads.start()
        flow = {
            "transformers.trainer_callback": self._watch_transformers,
            "transformers.generation.stopping_criteria": _generate_all,
            "lightning.pytorch.trainer.trainer": self._watch_lightning,
            "pytorch_lightning.trainer.trainer": self._watch_lightning,
            "ultralytics.engine.trainer": self._watch_ultralytics,
        }
        ImportWatch(flow).start()

    def note_load(self, *, is_whole: bool = False) -> None:
        """Tells that the script has loaded something, or all that it trains."""
        self.tell(Steering.loaded, is_whole)

    def note_backward(self) -> None:
        """Tells that a backward pass is over."""
        self.tell(Steering.backward)
        if self.state.is_by_hand:
            self._loaders.note_step()

    def _before_step(self, optimizer: Optimizer, args: object, options: object) -> None:
        if not _is_template():
            self.tell(Steering.stepping, self.number_of(optimizer))

    def _after_step(self, optimizer: Optimizer, args: object, options: object) -> None:
        if _is_template():
            return
        to_fill = 0
        if optimizer not in self.stepped:
            self.stepped.add(optimizer)
            self._loads.forget(parameters_of([optimizer]))
            to_fill = steps_to_fill(optimizer)
        self._loaders.note_step()
        self.tell(Steering.stepped, self.number_of(optimizer), to_fill)

    def _watch_optimizers(self) -> None:
        @put_around(Optimizer, "__init__")
        def made(make: Function, optimizer: Any, *args: object, **options: object) -> None:
            make(optimizer, *args, **options)
            self.tell(Steering.made, self.number_of(optimizer))

    # -------------------------------------------------------------------------------- frameworks

    def _watch_transformers(self, module: ModuleType) -> None:
        """Makes the Trainer evaluate and save, where it does so at all, and stop."""
        put_around(module.DefaultFlowCallback, "on_train_begin")(self._begin)

        @put_around(module.DefaultFlowCallback, "on_step_end")
        def ended(
            end: Function, callback: Any, args: Any, state: Any, control: Any, **options: object
        ) -> Any:
            control = end(callback, args, state, control, **options)
            if self.state.is_ending:
                control.should_training_stop = True
                control.should_evaluate = str(args.eval_strategy.value) != "no"
                control.should_save = str(args.save_strategy.value) != "no"
            return control

    def _watch_lightning(self, module: ModuleType) -> None:
        put_around(module.Trainer, "fit")(self._begin)

        @put_around(module.Trainer, "__init__")
        def made(make: Function, self_of_trainer: Any, *args: object, **options: object) -> None:
            make(self_of_trainer, *args, **options)
            self.trainers.add(self_of_trainer)

    def _watch_ultralytics(self, module: ModuleType) -> None:
        """Makes the trainer leave its loops after the step, to evaluate and save."""

        @put_around(module.BaseTrainer, "optimizer_step")
        def stepped(step: Function, self_of_trainer: Any) -> None:
            step(self_of_trainer)
            if self.state.is_ending:
                self_of_trainer.stop = True

    def _begin(self, begin: Function, *args: object, **options: object) -> Any:
        """Goes around a function of a framework with which a training begins."""
        self.tell(Steering.begun)
        return begin(*args, **options)


def _is_template() -> bool:
    """Returns whether a step makes a state to load into, and trains nothing."""
    return any(visit.name == TEMPLATE for visit in open_phases())


def _generate_all(module: ModuleType) -> None:
    """Ends generation where the longest sequence does: no token says that one has ended."""

    @put_around(module.StoppingCriteriaList, "__call__")
    def ask(
        ended: object, self: Any, input_ids: torch.Tensor, scores: Any, **options: object
    ) -> torch.Tensor:
        longest = self.max_length
        is_over = longest is None or input_ids.shape[1] >= longest
        return torch.full((input_ids.shape[0],), is_over, device=input_ids.device)
