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
from typing import Any

from torch.utils.data import dataloader

from residency._dryrun._methods import Function, around, put_around
from residency._dryrun._places import is_for_script
from residency._dryrun._ranks import be_first_rank
from residency._dryrun._steering import Steering
from residency._dryrun._telling import Telling


class Loaders:
    """The data loaders of a process's script.

    Attributes:
        short: The samples of a data set and the batch of its loader, which they do not fill: of
            one that steps are made of, or of any where there is no step; None for none.
    """

    def __init__(self, telling: Telling) -> None:
        """Watches none yet."""
        self.short: tuple[int, int] | None = None
        self._telling = telling
        self._has_steps = False
        self._own: set[object] = set()  # generators of loaders, which are watched

    def note_step(self) -> None:
        """Takes the loader that gave out a batch last as one that the training is made of."""
        last = self._telling.last
        if last is not None and (self.short is None or not self._has_steps):
            self.short = _unfilled(last)
            self._has_steps = True

    def start(self) -> None:
        """Watches all loaders from now on, and classes of them that are made from now on."""

        @put_around(dataloader._BaseDataLoaderIter, "__init__")
        def made(
            make: Function, iterator: Any, loader: Any, *args: object, **options: object
        ) -> None:
            make(iterator, loader, *args, **options)
            iterator._residency_loader = weakref.ref(loader)

        @put_around(dataloader._BaseDataLoaderIter, "__next__")
        def follow(following: Function, iterator: object) -> object:
            reference = getattr(iterator, "_residency_loader", None)
            loader = None if reference is None else reference()
            if loader is not None:
                telling, for_script = self._telling, is_for_script(sys._getframe(1))
                number, of = telling.number_of(loader), telling.number_of(iterator)
                do = telling.tell(Steering.asked_batch, number, of, for_script)
                if do.has_enough:
                    be_first_rank()
                if do.no_batch:
                    raise StopIteration
            self._telling.last = None  # after a last batch, of an evaluation, too
            batch = following(iterator)
            self._telling.last = loader
            return batch

        @put_around(dataloader.DataLoader, "__iter__")
        def begun(begin: Function, loader: object) -> object:
            counts = _iterates_by(type(loader)) not in self._own
            if not self._begin_pass(loader, sys._getframe(1), counts=counts):
                return iter(())
            if not self._has_steps and self.short is None:
                self.short = _unfilled(loader)
            return begin(loader)

        loaders: Any = dataloader.DataLoader

        @around(loaders.__init_subclass__)
        def watch(cls: Any, /, **options: object) -> None:
            super(loaders, cls).__init_subclass__(**options)
            own = vars(cls).get("__iter__")
            if inspect.isgeneratorfunction(own):
                cls.__iter__ = self._watched(own)

        loaders.__init_subclass__ = classmethod(watch)

    def _watched(self, iterate: Callable[..., Iterator[object]]) -> object:
        """Returns a loader's own ``__iter__``, whose end is one. [Note: own generators]"""

        @around(iterate)
        def iterated(loader: object) -> Iterator[object]:
            is_outer = _iterates_by(type(loader)) is iterated  # and not what that one asks
            if is_outer and not self._begin_pass(loader, sys._getframe(1)):
                return
            try:
                yield from iterate(loader)
            except RuntimeError as error:
                is_end = isinstance(error.__cause__, StopIteration)
                if not (is_end and self._telling.state.is_ending):
                    raise

        self._own.add(iterated)
        return iterated

    def _begin_pass(self, loader: object, frame: FrameType, *, counts: bool = True) -> bool:
        """Returns whether there is anything in a pass over a loader."""
        number, for_script = self._telling.number_of(loader), is_for_script(frame)
        return not self._telling.tell(Steering.passing, number, for_script, counts).no_batch


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
