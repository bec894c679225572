"""Brings a script to its end after some optimizer steps: it need not make 10,000 of them.

The loops of the script that led to the last step have no further round (``_loops``): what comes
after them (evaluation, the last save, a resume) then runs as the script has it. A loop in which the
optimizer was made goes on, as of folds: each of its rounds trains anew. Trainers of frameworks get
their own request to stop, and other loops of libraries no more batches. A training that cannot be
ended is left by ``SystemExit``.

Once the loops are over, a backward pass begins the next training, which makes its own steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from residency._dryrun._growing import NUM_STEPS as STEPS_OF_GROWTH
from residency._dryrun._histories import steps_to_fill
from residency._dryrun._loaders import Loaders
from residency._dryrun._loops import Loop, loops
from residency._dryrun._methods import around
from residency._dryrun._places import line_of
from residency._dryrun._reaching import LoadsOfTrained, share
from residency._dryrun._resumes import TEMPLATE
from residency._dryrun._unseen import branches_left_out
from residency._dtensor import local_of
from residency._memory import ImportWatch, open_phases
from residency._units import MIB

_MOST_LOOPS = 4  # that the answer names
_MOST_RESUMES = 3  # of a loop that loads in its rounds
_MOST_TRAININGS = 10  # until a loop that makes an optimizer in each round is ended, too
_PATIENCE = 10  # times the steps that were asked for, until each optimizer has made as many
_MUCH = MIB  # more after a step than after the one before: it may go on so
_MOST_FREE_PASSES = 20  # backward ones without an optimizer, which may come yet


class _StepByHand:
    """A stand-in for the optimizer, of a script that changes its parameters itself."""


class EnoughSeen(SystemExit):
    """The way out of a script whose loop goes on: no error, and not caught as one."""


class Stopping:
    """The count of the optimizer's steps, which ends each training after so many.

    Attributes:
        num_steps: Steps from one load of a checkpoint, or one training, to the next, of the
            optimizer that has made the most there, added up.
        is_ending: Whether enough has been seen of the training, and no other has begun.
        was_left: Whether the script was left in the middle of its loop.
        has_framework: Whether one says when a training begins.
    """

    def __init__(
        self,
        num_steps: int,
        optimizers: Iterable[Optimizer] = (),
        held: Callable[[], int] = lambda: 0,
    ) -> None:
        """Begins at 0 steps.

        Args:
            num_steps: After how many the training ends; 0 for never.
            optimizers: Those that there are.
            held: Returns the bytes that tensors hold on the device.
        """
        self.num_steps = 0
        self.is_ending = False
        self.was_left = False
        self._was_ended = False  # of any training, after enough steps
        self._wanted = num_steps
        self._goal = num_steps  # of this training: more where what is held has grown
        self._held = held
        self._held_after: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._num_counts = 0  # begun
        self._optimizers = optimizers
        self._loaders = Loaders(self, held)
        self._loads = LoadsOfTrained(self._reach, self.resume)
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._has_ended_loops = False  # as this training has ended
        self._num_trainings = 0  # that have ended
        self._num_resumes = 0
        self.has_framework = False
        self._num_late = 0  # steps after the end
        self._counts: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._since_load: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._num_before_load = 0
        # The loops around the place where an optimizer was made, and their rounds.
        self._made_in: weakref.WeakKeyDictionary[Any, list[tuple[weakref.ref[Loop], int]]]
        self._made_in = weakref.WeakKeyDictionary()
        # The loops around loads into what is not trained yet, their rounds, and the parameters.
        self._loaded_in: list[tuple[weakref.ref[Loop], int, list[weakref.ref[torch.Tensor]]]] = []
        self._made_since: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # the end
        self._groups: list[weakref.WeakSet[Optimizer]] = []  # that stepped in one training
        self._ahead: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # with a step after the end
        self._trainers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._by_hand: Any = _StepByHand()
        self._num_by_hand = 0

    def left_out(self) -> dict[str, object]:
        """Returns what was left out of the script, as the answer has it: the outermost loop first,
        with its rounds and how many of it are left, if that is known.
        """
        short, branches = self._loaders.short, branches_left_out(loops.cut, loops.entered)
        if self._was_ended:
            branches["thaws"] += self._thawing_callbacks()
        cut = list(loops.cut.items())[: -_MOST_LOOPS - 1 : -1]
        return {
            "loops": [
                {"line": line_of(*line), "rounds": num_rounds, "left": left}
                for line, (num_rounds, left) in cut
            ],
            **branches,
            "evaluations": self._loaders.num_cut,
            "data": short and {"samples": short[0], "batch": short[1]},
        }

    def _thawing_callbacks(self) -> list[str]:
        """Returns the classes of Lightning's callbacks that train more layers from an epoch on."""
        found = []
        for trainer in list(self._trainers):
            for callback in trainer.callbacks:
                names = [each.__name__ for each in type(callback).__mro__]
                found += [names[0]] if "BaseFinetuning" in names else []
        return found

    @property
    def was_cut(self) -> bool:
        """Whether a training was ended before its time: one whose loops had no further round, and
        that no framework or loader ends, came to its own end.
        """
        is_shortened = loops.cut or self._loaders.have_ended or self._loaders.num_cut
        return self._was_ended and bool(is_shortened or self.has_framework or self.was_left)

    @property
    def is_by_hand(self) -> bool:
        """Whether backward passes are counted, as there is no optimizer."""
        return self._by_hand in self._counts

    def unstepped_bytes(self) -> int:
        """Returns the bytes of parameters on the device that an optimizer has, and that none has
        stepped: their gradients and states may be still to come.
        """
        stepped = set(map(id, _parameters(list(self._stepped))))
        rest = {id(each): each for each in _parameters(list(self._optimizers))}
        found = [local_of(rest[key]) for key in rest.keys() - stepped if not is_lazy(rest[key])]
        return sum(each.nbytes for each in found if each.is_cuda and each.requires_grad)

    def start(self) -> None:
        """Counts from now on."""
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        if not self._wanted:
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

    def note_load(self) -> None:
        """Begins to count anew: the script has loaded something, and may train it.

        What a load reaches, and whether that is a resume, is seen later (``_reaching``).
        """
        self._count_from_here()

    def resume(self) -> None:
        """Begins to count anew: the script has loaded a checkpoint into what it trains.

        Loops that are in their last round go on. A training of their own begins by itself, as one
        of a framework does.
        """
        self._count_from_here()
        if not self.is_ending or self.is_past or self.has_framework:
            return
        if self._num_resumes < _MOST_RESUMES:
            self._num_resumes += 1
            loops.go_on()
            self._begin_training()

    def note_backward(self) -> None:
        """Begins the next training with its first backward pass, and takes one for a step where a
        script has made many, and no optimizer.

        Some scripts run backward passes before they make their optimizer (gradient-based
        initialisation). Training restarts at that optimizer's first step.
        """
        if self.is_past or len(self._made_since):
            self._begin_training()
        if len(list(self._optimizers)):
            return
        self._num_by_hand += 1
        if self._num_by_hand > _MOST_FREE_PASSES:
            self._before_step(self._by_hand, None, None)
            self._after_step(self._by_hand, None, None)

    @property
    def is_past(self) -> bool:
        """Whether the script has left the loops of the training that has ended."""
        return self._has_left_loops and not loops.are_in_library

    @property
    def _has_left_loops(self) -> bool:
        return self.is_ending and self._has_ended_loops and not loops.is_ending

    def _begin_training(self) -> None:
        """Counts the steps of another training, where one has ended."""
        if not self.is_ending:
            return
        self.is_ending = self._has_ended_loops = False
        self._num_trainings += 1
        self._num_late = 0
        self._groups.append(weakref.WeakSet(self._counts))
        for each in (self._counts, self._made_since, self._ahead):
            each.clear()
        self._loaders.begin_training()
        self._count_from_here()

    def steps_of_training(self) -> tuple[int, int]:
        """Returns which count it is, anew with each training and load, and the steps in all."""
        return self._num_counts, self.num_steps

    def _count_from_here(self) -> None:
        self._num_counts += 1
        self._goal = self._wanted
        self._held_after.clear()
        self._since_load.clear()
        self._num_before_load = self.num_steps

    def _before_step(self, optimizer: Optimizer, args: object, options: object) -> None:
        self.see_optimizers()
        if _is_template():
            return
        if self.is_past or optimizer in self._made_since:
            self._begin_training()
        if not self.is_ending:
            return
        self._num_late += 1
        # They are in their last round, unless a library has begun them anew.
        if not self._has_left_loops and (loops.is_ending or self._end_loops()):
            is_known = self._num_late <= _PATIENCE * self._wanted
        else:  # a loader that is over may have given out one more batch, to who looks ahead
            is_known = self._loaders.have_trained and optimizer not in self._ahead
        if not is_known:
            self.leave()
        self._ahead.add(optimizer)

    def _after_step(self, optimizer: Optimizer, args: object, options: object) -> None:
        if _is_template():
            return
        if optimizer is not self._by_hand and optimizer not in self._stepped:
            self._stepped.add(optimizer)
            self._loads.forget(_parameters([optimizer]))
            self._goal = max(self._goal, steps_to_fill(optimizer) if self._wanted else 0)
        count = self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        since = self._since_load[optimizer] = self._since_load.get(optimizer, 0) + 1
        self.num_steps = max(self.num_steps, self._num_before_load + since)
        self._loaders.note_step()
        self._note_held(optimizer, count)
        if self._wanted and not self.is_ending and self._has_seen_enough(count):
            self.is_ending = self._was_ended = True
            for trainer in list(self._trainers):
                trainer.should_stop = True
        if self.is_ending and count >= self._wanted:
            self._end_loops()

    def _note_held(self, optimizer: Optimizer, count: int) -> None:
        """Asks for more steps where the last one of those wanted has left more than the one before:
        whether that goes on shows in these.
        """
        held, before = self._held(), self._held_after.get(optimizer)
        self._held_after[optimizer] = held
        if before is not None and count == self._wanted and held - before >= _MUCH:
            self._goal = max(self._wanted, STEPS_OF_GROWTH)

    def _end_loops(self) -> bool:
        """Ends the loops that led here, each after this round of it.

        One goes on if in this round the optimizer was made, or what it trains was loaded before
        its first step: the next one trains anew.

        Returns:
            Whether there is one that is ended.
        """
        made_in = [
            (loop(), number)
            for optimizer in list(self._counts)
            for loop, number in self._made_in.get(optimizer, ())
            if self._num_trainings < _MOST_TRAININGS
        ]
        go_on = {e for e, number in made_in if e and e.num_rounds == number}
        is_ended = loops.end(but=go_on | self._loops_that_load())
        self._has_ended_loops |= is_ended
        return is_ended

    def _reach(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Resumes where a load has reached what is trained, and returns whether it has.

        Of one before the first step of a training, the loops around it are noted: whether it
        reaches what is trained is seen later.
        """
        of = list(parameters)
        if self.is_past or not len(self._counts):
            weak = [weakref.ref(each) for each in of]
            self._loaded_in = [each for each in self._loaded_in if each[0]() is not None]
            self._loaded_in += [(weakref.ref(e), e.num_rounds, weak) for e in loops.around()]
        is_trained = self._is_trained(of)
        if is_trained:
            self.resume()
        return is_trained

    def _loops_that_load(self) -> set[Loop]:
        """Returns the loops in whose round what is trained was loaded before its training."""
        found = set()
        for reference, number, parameters in self._loaded_in:
            loop = reference()
            if loop is None or loop.num_rounds != number or number > _MOST_RESUMES:
                continue
            there = (each() for each in parameters)
            if self._is_trained([each for each in there if each is not None]):
                found.add(loop)
        return found

    def see_optimizers(self) -> None:
        """Begins training anew where an optimizer was made after passes that were counted."""
        if self.is_by_hand and len(list(self._optimizers)):
            self.num_steps = 0
            self.is_ending, self._was_ended = True, False
            self._begin_training()

    def _has_seen_enough(self, count: int) -> bool:
        """Returns whether the steps are made: by each of a GAN's optimizers, too."""
        if count < self._goal:
            return False
        used = filter(self._is_used, list(self._optimizers))
        is_each_seen = all(self._counts.get(each, 0) >= self._goal for each in used)
        return is_each_seen or count >= _PATIENCE * self._goal

    def _is_used(self, optimizer: Optimizer) -> bool:
        """Returns whether an optimizer may step in this training: it has not in one before, or it
        has beside one that does now.
        """
        groups = [group for group in self._groups if optimizer in group]
        return not groups or any(each in self._counts for group in groups for each in group)

    def _is_trained(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Returns whether an optimizer has stepped one of some parameters."""
        return self.is_by_hand or share(parameters, _parameters(list(self._stepped)))

    def leave(self) -> NoReturn:
        """Leaves the script in the middle of its loop."""
        self.was_left = True
        raise EnoughSeen(0)

    def _watch_optimizers(self) -> None:
        kind: Any = Optimizer
        make = kind.__init__

        @around(make)
        def made(optimizer: Any, *args: object, **options: object) -> None:
            make(optimizer, *args, **options)
            around = loops.around()
            self._made_in[optimizer] = [(weakref.ref(each), each.num_rounds) for each in around]
            if self.is_ending and not loops.is_ending:
                self._made_since.add(optimizer)

        kind.__init__ = made

    # -------------------------------------------------------------------------------- frameworks

    def _watch_transformers(self, module: ModuleType) -> None:
        """Makes the Trainer evaluate and save, where it does so at all, and stop."""
        flow: Any = vars(module)["DefaultFlowCallback"]
        before: Callable[..., Any] = flow.on_step_end

        @around(before)
        def on_step_end(
            callback: Any, args: Any, state: Any, control: Any, **options: object
        ) -> Any:
            control = before(callback, args, state, control, **options)
            if self.is_ending:
                control.should_training_stop = True
                control.should_evaluate = str(args.eval_strategy.value) != "no"
                control.should_save = str(args.save_strategy.value) != "no"
            return control

        flow.on_step_end = on_step_end
        flow.on_train_begin = self._beginning(flow.on_train_begin)

    def _watch_lightning(self, module: ModuleType) -> None:
        trainer: Any = vars(module)["Trainer"]
        make = trainer.__init__

        @around(make)
        def made(self_of_trainer: Any, *args: object, **options: object) -> None:
            make(self_of_trainer, *args, **options)
            self._trainers.add(self_of_trainer)

        trainer.__init__ = made
        trainer.fit = self._beginning(trainer.fit)

    def _watch_ultralytics(self, module: ModuleType) -> None:
        """Makes the trainer leave its loops after the step, to evaluate and save."""
        trainer: Any = vars(module)["BaseTrainer"]
        step: Callable[[Any], None] = trainer.optimizer_step

        @around(step)
        def stepped(self_of_trainer: Any) -> None:
            step(self_of_trainer)
            if self.is_ending:
                self_of_trainer.stop = True

        trainer.optimizer_step = stepped

    def _beginning(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function of a framework with which a training begins."""

        @around(begin)
        def begun(*args: object, **options: object) -> Any:
            self.has_framework = True
            self._begin_training()
            return begin(*args, **options)

        return begun


def _parameters(optimizers: Iterable[Optimizer]) -> Iterable[torch.Tensor]:
    groups = (group for each in optimizers for group in getattr(each, "param_groups", ()))
    return (parameter for group in groups for parameter in group["params"])


def _is_template() -> bool:
    """Returns whether a step makes a state to load into, and trains nothing."""
    return any(visit.name == TEMPLATE for visit in open_phases())


def _generate_all(module: ModuleType) -> None:
    """Ends generation where the longest sequence does: no token says that one has ended."""
    criteria: Any = vars(module)["StoppingCriteriaList"]

    @around(criteria.__call__)
    def ask(self: Any, input_ids: torch.Tensor, scores: Any, **options: object) -> torch.Tensor:
        longest = self.max_length
        is_over = longest is None or input_ids.shape[1] >= longest
        return torch.full((input_ids.shape[0],), is_over, device=input_ids.device)

    criteria.__call__ = ask
