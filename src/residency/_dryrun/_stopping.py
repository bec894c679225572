"""Brings a script to its end after some optimizer steps: it need not make 10,000 of them.

The training loop ends as if its data had: what comes after it (evaluation, the last save, a resume)
then runs as the script has it. Trainers of frameworks get their own request to stop. The loops of
epochs and those without data loaders are ended at their heads (``_loops``); one where that cannot
be is left by ``SystemExit``.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, ModuleType
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import dataloader

from residency._dryrun._loops import Key, Loops, is_asked_by_script
from residency._memory import ImportWatch
from residency._units import MIB

_MOST_RESUMES = 3
_PATIENCE = 10  # times the steps that were asked for, until an optimizer makes its first one
_FEW_EMPTY_PASSES = 2  # over loaders that are over, as of epochs that are still to come
_FEW_SHORT_PASSES = 2  # of an evaluation, the first among them
_EVEN_BATCHES = 32  # of an evaluation, after which it ends where they have left nothing behind
_EVEN_BYTES = MIB  # a loss of each batch is nothing; logits are more
_MOST_EMPTY_PASSES = 1000  # in a loop that waits for a batch, and cannot be ended


class _StepByHand:
    """A stand-in for the optimizer, of a script that changes its parameters itself."""


class EnoughSeen(SystemExit):
    """The way out of a script whose loop goes on: no error, and not caught as one."""


class _AfterTheEnd:
    """The batches of a loader after the training: who asks for the first decides what they are."""

    def __init__(self, choose: Callable[[FrameType], Iterator[Any]]) -> None:
        self._choose = choose
        self._batches: Iterator[Any] | None = None

    def __iter__(self) -> _AfterTheEnd:
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = self._choose(sys._getframe(1))
        return next(self._batches)


class Stopping:
    """The count of the optimizer's steps, which ends the training after so many.

    Attributes:
        num_steps: Steps from one load of a checkpoint to the next, of the optimizer that has made
            the most there, added up.
        is_ending: Whether enough has been seen.
        was_cut: Whether a training was ended; it may go on after a load.
        was_left: Whether the script was left in the middle of its loop.
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
        self.was_cut = False
        self.was_left = False
        self._wanted = num_steps
        self._optimizers = optimizers
        self._counts: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._since_load: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._num_before_load = 0
        self._ahead: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # with a step after the end
        self._loops = Loops(_finish)
        self._num_resumes = 0
        self._num_empty_passes = 0
        self._is_feeding = False  # a loop that can be ended by its next step alone
        self._last: Any = None  # the iterator that gave out a batch last
        self._training: weakref.WeakSet[Any] = weakref.WeakSet()  # loaders that steps were made of
        # The script's loops in which an optimizer was made, and those over a loader.
        self._made_in: weakref.WeakKeyDictionary[Any, frozenset[Key]] = weakref.WeakKeyDictionary()
        self._over: weakref.WeakKeyDictionary[Any, frozenset[Key]] = weakref.WeakKeyDictionary()
        self._passes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._trainers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._held = held
        # Batches of an evaluation, and what was held on the device when it was looked at.
        self._given: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._by_hand: Any = _StepByHand()
        self._num_by_hand = 0

    @property
    def is_by_hand(self) -> bool:
        """Whether backward passes are counted, as there is no optimizer."""
        return self._by_hand in self._counts

    def start(self) -> None:
        """Counts from now on."""
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        if not self._wanted:
            return
        self._watch_optimizers()
        self._watch_loaders()
        flow = {
            "transformers.trainer_callback": self._watch_transformers,
            "transformers.generation.stopping_criteria": _generate_all,
            "lightning.pytorch.trainer.trainer": self._watch_lightning,
            "pytorch_lightning.trainer.trainer": self._watch_lightning,
        }
        ImportWatch(flow).start()

    def resume(self) -> None:
        """Begins to count anew: the script has loaded a checkpoint, and may train on."""
        self._since_load.clear()
        self._num_before_load = self.num_steps
        if self.is_ending and self._num_resumes < _MOST_RESUMES:
            self._num_resumes += 1
            self._begin_anew()

    def note_backward(self) -> None:
        """Takes a backward pass for a step where a script has made many, and no optimizer.

        Some make passes before their optimizer, to draw a start from gradients: what was ended
        begins anew with the first step of one.
        """
        if len(list(self._optimizers)):
            return
        self._num_by_hand += 1
        if self._num_by_hand > _PATIENCE * max(1, self._wanted):
            self._before_step(self._by_hand, None, None)
            self._after_step(self._by_hand, None, None)

    def _begin_anew(self) -> None:
        self.is_ending = False
        self._counts.clear()
        self._ahead.clear()
        self._is_feeding = False
        self._loops.forget()
        self._training.clear()
        self._passes.clear()

    def _before_step(self, optimizer: Optimizer, args: object, options: object) -> None:
        self._see_optimizers()
        if not self.is_ending or self._counts.get(optimizer, 0) < self._wanted:
            return
        # A loader that is over may have given out one more batch, to a loop that looks ahead.
        is_known = (len(self._training) and not self._is_feeding) or self._loops.is_ending
        if (optimizer in self._ahead or not is_known) and not self._loops.end():
            self._leave()
        self._ahead.add(optimizer)

    def _after_step(self, optimizer: Optimizer, args: object, options: object) -> None:
        count = self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        since = self._since_load[optimizer] = self._since_load.get(optimizer, 0) + 1
        self.num_steps = max(self.num_steps, self._num_before_load + since)
        self._num_empty_passes = 0
        if self._last is not None:
            self._training.add(self._last)
        if self.is_ending and (count >= self._wanted or self._last is not None):
            self._end_loops(optimizer)  # a training after the first: its loader is over
        elif self._wanted and not self.is_ending and self._has_seen_enough(count):
            self.is_ending = self.was_cut = True
            self._end_loops(optimizer)
            for trainer in list(self._trainers):
                trainer.should_stop = True

    def _end_loops(self, optimizer: Optimizer) -> None:
        """Ends the loops after this round: in an epoch without batches a script may divide by their
        number.

        A loop over a loader ends with its data. One in which the optimizer was made goes on, as
        each of its rounds trains anew.
        """
        over = [self._over.get(loader, frozenset()) for loader in self._training]
        made_in = self._made_in.get(optimizer, frozenset())
        self._loops.end_all(but=made_in.union(*over))

    def _see_optimizers(self) -> None:
        """Begins training anew where an optimizer was made after passes that were counted."""
        if self.is_by_hand and len(list(self._optimizers)):
            self.num_steps = self._num_before_load = 0
            self.was_cut = False
            self._begin_anew()

    def _has_seen_enough(self, count: int) -> bool:
        """Returns whether the steps are made: by each of a GAN's optimizers, too."""
        if count < self._wanted:
            return False
        is_each_seen = all(optimizer in self._counts for optimizer in list(self._optimizers))
        return is_each_seen or count >= _PATIENCE * self._wanted

    def _leave(self) -> NoReturn:
        self.was_left = True
        raise EnoughSeen(0)

    def _watch_optimizers(self) -> None:
        kind: Any = Optimizer
        make = kind.__init__

        @functools.wraps(make)
        def made(optimizer: Any, *args: object, **options: object) -> None:
            make(optimizer, *args, **options)
            self._made_in[optimizer] = self._loops.around()

        kind.__init__ = made

    # ------------------------------------------------------------------------------ data loaders

    def _watch_loaders(self) -> None:
        base: Any = dataloader._BaseDataLoaderIter
        make, following = base.__init__, base.__next__

        @functools.wraps(make)
        def made(iterator: Any, loader: Any, *args: object, **options: object) -> None:
            make(iterator, loader, *args, **options)
            iterator._residency_loader = weakref.ref(loader)

        @functools.wraps(following)
        def follow(iterator: Any) -> Any:
            reference = getattr(iterator, "_residency_loader", None)
            loader = None if reference is None else reference()
            if loader is not None and (self._is_over(loader) or self._has_enough(iterator, loader)):
                raise StopIteration
            self._last = None  # after a last batch, of an evaluation, too
            batch = following(iterator)
            self._last = loader
            return batch

        loaders: Any = dataloader.DataLoader
        begin = loaders.__iter__

        @functools.wraps(begin)
        def begun(loader: Any) -> Any:
            if self._is_over(loader):
                return _AfterTheEnd(lambda frame: self._batches(loader, frame, begin))
            self._over[loader] = self._loops.headed()
            iterator = begin(loader)
            if self.is_ending and not self._is_feeding:
                self._passes[loader] = self._passes.get(loader, 0) + 1
                self._given.pop(iterator, None)  # persistent workers have one for all passes
                if self._passes[loader] > _FEW_SHORT_PASSES:
                    self._end_loop()
            return iterator

        base.__init__, base.__next__, loaders.__iter__ = made, follow, begun

    def _batches(
        self, loader: Any, frame: FrameType, begin: Callable[[Any], Iterator[Any]]
    ) -> Iterator[Any]:
        """Returns what a loader that is over gives to a frame: nothing to a loop.

        Who asks for the next batch by a call has no use for an end, and gets it, for a last step.
        """
        if not self._is_over(loader):  # the script has loaded a checkpoint since it began
            return begin(loader)
        ends = self._end_loop()
        self._is_feeding = is_asked_by_script(frame) or not ends
        return begin(loader) if self._is_feeding else iter(())

    def _end_loop(self) -> bool:
        """Ends the loop around passes that give nothing more, after some of them.

        Returns:
            Whether it ends, as far as is known.
        """
        self._num_empty_passes += 1  # `while step < last: for batch in loader` has no end
        if self._num_empty_passes > _MOST_EMPTY_PASSES:
            self._leave()
        is_many = self._num_empty_passes > _FEW_EMPTY_PASSES
        return not is_many or self._loops.is_ending or self._loops.end()

    def _is_over(self, loader: Any) -> bool:
        """Returns whether a loader gives nothing more: the training that it is for was seen."""
        self._see_optimizers()
        return self.is_ending and not self._is_feeding and loader in self._training

    def _has_enough(self, iterator: Any, loader: Any) -> bool:
        """Returns whether an evaluation has batches enough.

        That is one after the first pass, for those who divide by how many there were, and of the
        first pass as many as show that they leave nothing on the device.
        """
        if not self.is_ending or self._is_feeding:
            return False
        number, held = self._given.get(iterator, (0, 0))
        if number and self._passes.get(loader, 0) > 1:
            return True
        if number % _EVEN_BATCHES == 0:
            now = self._held()
            if number and now - held < _EVEN_BYTES:
                return True
            held = now
        self._given[iterator] = number + 1, held
        return False

    # -------------------------------------------------------------------------------- frameworks

    def _watch_transformers(self, module: ModuleType) -> None:
        """Makes the Trainer evaluate and save, where it does so at all, and stop."""
        flow: Any = vars(module)["DefaultFlowCallback"]
        before: Callable[..., Any] = flow.on_step_end

        @functools.wraps(before)
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

    def _watch_lightning(self, module: ModuleType) -> None:
        trainer: Any = vars(module)["Trainer"]
        make = trainer.__init__

        @functools.wraps(make)
        def made(self_of_trainer: Any, *args: object, **options: object) -> None:
            make(self_of_trainer, *args, **options)
            self._trainers.add(self_of_trainer)

        trainer.__init__ = made


def _finish() -> NoReturn:
    """Leaves a script that has nothing more to do."""
    raise EnoughSeen(0)


def _generate_all(module: ModuleType) -> None:
    """Ends generation where the longest sequence does: no token says that one has ended."""
    criteria: Any = vars(module)["StoppingCriteriaList"]

    def ask(self: Any, input_ids: torch.Tensor, scores: Any, **options: object) -> torch.Tensor:
        longest = self.max_length
        is_over = longest is None or input_ids.shape[1] >= longest
        return torch.full((input_ids.shape[0],), is_over, device=input_ids.device)

    criteria.__call__ = functools.wraps(criteria.__call__)(ask)
