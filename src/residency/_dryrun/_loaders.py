"""The data loaders of a script, whose passes end early once enough was seen of the training.

Loops of the script end by themselves (``_loops``), and with them what they ask for. A loop of a
library ends where the loader that it trains on gives it nothing more. An evaluation gets as many
batches as show what it keeps of each.

[Note: own generators] A loader may have a generator of its own for ``__iter__``. One that asks the
iterator below for each batch with ``next`` has no answer for its end; Python makes a
``RuntimeError`` of that. Some ask for that iterator once, and for all passes.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Protocol

from torch.utils.data import dataloader

from residency._dryrun._loops import loops
from residency._dryrun._methods import around
from residency._dryrun._places import is_for_script
from residency._dryrun._ranks import be_first_rank
from residency._units import MIB

_MOST_SHORT_PASSES = 100  # of an evaluation, until the loops around it are ended
_EVEN_BATCHES = 32  # of an evaluation, after which it ends where they have left nothing behind
_EVEN_BYTES = MIB  # a loss of each batch is nothing; logits are more
_MOST_EMPTY_PASSES = 1000  # in a library's loop that waits for a batch


class Training(Protocol):
    """A training, as far as its loaders ask.

    Attributes:
        is_ending: Whether enough has been seen of it, and no other has begun.
    """

    is_ending: bool

    @property
    def is_past(self) -> bool:
        """Whether the script has left the loops of the training that has ended."""
        ...

    def see_optimizers(self) -> None:
        """Takes note of optimizers that were made meanwhile."""

    def leave(self) -> None:
        """Leaves the script."""


class Loaders:
    """The data loaders of a process's script.

    Attributes:
        num_cut: Passes of evaluations that have ended early.
        have_ended: Whether one has given a library's loop that trains nothing more.
        short: The samples of a data set and the batch of its loader, which they do not fill: of
            one that steps are made of, or of any where there is no step; None for none.
    """

    def __init__(self, training: Training, held: Callable[[], int]) -> None:
        """Watches none yet.

        Args:
            training: What is under way.
            held: Returns the bytes that tensors hold on the device.
        """
        self.num_cut = 0
        self.have_ended = False
        self.short: tuple[int, int] | None = None
        self._has_steps = False
        self._now = training
        self._held = held
        self._last: object = None  # the loader that gave out a batch last
        self._of_steps: weakref.WeakSet[object] = weakref.WeakSet()  # those that steps were made of
        self._num_empty_passes = 0
        self._own: set[object] = set()  # generators of loaders, which are watched
        # Since the end: passes over each loader; batches of one, and what was held at its begin.
        self._passes: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._given: weakref.WeakKeyDictionary[object, tuple[int, int, int]]
        self._given = weakref.WeakKeyDictionary()

    @property
    def have_trained(self) -> bool:
        """Whether a loader gave the batches of the training."""
        return len(self._of_steps) > 0

    def note_step(self) -> None:
        """Takes the loader that gave out a batch last as one that the training is made of."""
        if self._last is None or self._last in self._of_steps:
            return
        self._of_steps.add(self._last)
        if not self._has_steps or self.short is None:
            self.short = _unfilled(self._last)
        self._has_steps = True

    def begin_training(self) -> None:
        """Forgets what was of the training before."""
        self._num_empty_passes = 0
        self._of_steps.clear()
        self._passes.clear()

    def start(self) -> None:
        """Watches all loaders from now on, and classes of them that are made from now on."""
        base: Any = dataloader._BaseDataLoaderIter
        make, following = base.__init__, base.__next__

        @around(make)
        def made(iterator: Any, loader: object, *args: object, **options: object) -> None:
            make(iterator, loader, *args, **options)
            iterator._residency_loader = weakref.ref(loader)

        @around(following)
        def follow(iterator: object) -> object:
            reference = getattr(iterator, "_residency_loader", None)
            loader = None if reference is None else reference()
            if loader is not None and self._is_over(loader, sys._getframe(1)):
                raise StopIteration
            if loader is not None and self._has_enough(iterator, loader):
                be_first_rank()
                self.num_cut += 1
                raise StopIteration
            self._last = None  # after a last batch, of an evaluation, too
            batch = following(iterator)
            self._last = loader
            return batch

        loaders: Any = dataloader.DataLoader
        begin = loaders.__iter__

        @around(begin)
        def begun(loader: object) -> object:
            if self._is_over(loader, sys._getframe(1)):
                self._note_empty_pass()  # `while step < last: for batch in loader` has no end
                return iter(())
            if not self._has_steps and self.short is None:
                self.short = _unfilled(loader)
            if _iterates_by(type(loader)) not in self._own:
                self._begin_pass(loader)
            return begin(loader)

        @around(loaders.__init_subclass__)
        def watch(cls: Any, /, **options: object) -> None:
            super(loaders, cls).__init_subclass__(**options)
            own = vars(cls).get("__iter__")
            if inspect.isgeneratorfunction(own):
                cls.__iter__ = self._watched(own)

        base.__init__, base.__next__, loaders.__iter__ = made, follow, begun
        loaders.__init_subclass__ = classmethod(watch)

    def _watched(self, iterate: Callable[..., Iterator[object]]) -> object:
        """Returns a loader's own ``__iter__``, whose end is one. [Note: own generators]"""

        @around(iterate)
        def iterated(loader: object) -> Iterator[object]:
            if _iterates_by(type(loader)) is iterated:  # and not what that one asks
                if self._is_over(loader, sys._getframe(1)):
                    self._note_empty_pass()
                    return
                self._begin_pass(loader)
            try:
                yield from iterate(loader)
            except RuntimeError as error:
                if not self._now.is_ending or not isinstance(error.__cause__, StopIteration):
                    raise

        self._own.add(iterated)
        return iterated

    def _begin_pass(self, loader: object) -> None:
        if not self._now.is_ending:
            return
        self._passes[loader] = self._passes.get(loader, 0) + 1
        if self._passes[loader] > _MOST_SHORT_PASSES:
            loops.end()

    def _note_empty_pass(self) -> None:
        self._num_empty_passes += 1
        if self._num_empty_passes > _MOST_EMPTY_PASSES:
            self._now.leave()

    def _is_over(self, loader: object, frame: FrameType) -> bool:
        """Returns whether a loader gives nothing more to a frame: it is a library's that trains."""
        self._now.see_optimizers()
        is_ended = self._now.is_ending and not self._now.is_past and loader in self._of_steps
        is_over = is_ended and not is_for_script(frame)
        self.have_ended |= is_over
        return is_over

    def _has_enough(self, iterator: object, loader: object) -> bool:
        """Returns whether an evaluation has batches enough.

        That is one after the first pass, for those who divide by how many there were, and of the
        first pass as many as show that they leave nothing on the device.
        """
        if not self._now.is_ending:
            return False
        number_of_pass = self._passes.get(loader, 0)
        of_pass, number, held = self._given.get(iterator, (number_of_pass, 0, 0))
        if of_pass != number_of_pass:  # of an iterator that is one for all passes
            number = 0
        if number and number_of_pass > 1:
            return True
        if number % _EVEN_BATCHES == 0:
            now = self._held()
            if number and now - held < _EVEN_BYTES:
                return True
            held = now
        self._given[iterator] = number_of_pass, number + 1, held
        return False


def _unfilled(loader: Any) -> tuple[int, int] | None:
    """Returns the samples of a loader's data and its batch, which is larger; else None."""
    batch: object = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    try:
        num_samples = len(loader.dataset)
    except Exception:  # a class's own, of the script: one without a length may say so by any error
        return None
    return (num_samples, batch) if isinstance(batch, int) and num_samples < batch else None


def _iterates_by(cls: type) -> object:
    return next(vars(each)["__iter__"] for each in cls.__mro__ if "__iter__" in vars(each))
