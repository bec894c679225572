"""The way from those who listen to a script to the reducer (``_steering``): objects become numbers,
and what it decides is done.

Loops of the script end as Python ends one (``_loops``), and trainers of frameworks get their own
request to stop. A training that cannot be ended is left by ``SystemExit``.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TextIO

import torch
from torch.optim import Optimizer

from residency._dryrun._files import files_of_run
from residency._dryrun._from_files import address_of
from residency._dryrun._loops import loops
from residency._dryrun._steering import Do, Happened, Here, Round, Steering, advance

EVENTS = "RESIDENCY_DRY_RUN_EVENTS"  # a folder, for a list of the events of each process
_Facts = ParamSpec("_Facts")


class EnoughSeen(SystemExit):
    """The way out of a script whose loop goes on: no error, and not caught as one."""


class Telling:
    """The line from one process's script to the reducer, for one event at a time: some come from
    autograd's threads.

    Attributes:
        state: What has happened, as far as it decides.
        stepped: The optimizers that have made a step.
        trainers: Those of frameworks that can be asked to stop.
        last: The loader that gave out a batch last; None where that was its last one.
    """

    def __init__(
        self,
        num_steps: int,
        optimizers: Iterable[Optimizer] = (),
        held: Callable[[], int] = lambda: 0,
    ) -> None:
        """Begins before the first event.

        Args:
            num_steps: After how many a training ends; 0 for never.
            optimizers: Those that there are.
            held: Returns the bytes that tensors hold on the device.
        """
        self.state = Steering(wanted=num_steps)
        self.stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.trainers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.last: object = None
        self._optimizers = optimizers
        self._held = held
        # By their ids, for as long as they are there: what is known by an address may come again.
        self._numbers: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._next = itertools.count(1)
        self._gone: deque[int] = deque()
        self._reached: dict[int, list[weakref.ref[torch.Tensor]]] = {}  # their parameters
        self._lock = threading.RLock()
        self._list = _new_list(num_steps)
        os.register_at_fork(after_in_child=self._follow_fork)

    def _follow_fork(self) -> None:
        """Begins with the parent's state, but a lock that is free, and no list."""
        self._lock, self._list = threading.RLock(), None

    def number_of(self, thing: object) -> int:
        """Returns the number of an optimizer, a loader or an iterator, which no other one has."""
        key = id(thing)
        with self._lock:
            if key in self._numbers:
                return self._numbers[key][1]
            number = next(self._next)

            def forget(gone: object) -> None:
                del self._numbers[key]
                self._gone.append(number)  # and no more: this may be called at any moment

            self._numbers[key] = weakref.ref(thing, forget), number
        return number

    def tell(
        self,
        event: Callable[Concatenate[Steering, _Facts], None],
        *facts: _Facts.args,
        **none: _Facts.kwargs,
    ) -> Do:
        """Tells an event with its facts, and does what follows, but for what a listener alone can.

        Raises:
            EnoughSeen: The script is left.
        """
        with self._lock:
            happened = Happened(event.__name__, self._here(), facts)
            self.state, do = advance(self.state, happened)
            if self._list is not None:
                done = {name: each for name, each in asdict(do).items() if each}
                print(json.dumps([*happened, done]), file=self._list, flush=True)
            if do.go_on:
                loops.go_on()
            if do.end:
                loops.end(do.end)
            for trainer in list(self.trainers) if do.stop_trainers else ():
                trainer.should_stop = True
        if do.leave:
            raise EnoughSeen(0)
        return do

    def reach(self, parameters: Iterable[torch.Tensor], *, is_copied: bool = False) -> None:
        """Tells that a load has reached parameters."""
        of = list(parameters)
        with self._lock:
            number = next(self._next)
            self._reached[number] = [weakref.ref(each) for each in of]
            self.tell(Steering.reached, number, self._is_trained(of), is_copied)
            kept = {load for load, _ in self.state.loads}
            self._reached = {load: of for load, of in self._reached.items() if load in kept}

    def _here(self) -> Here:
        around = tuple(Round(e.number, e.num_rounds, e.has_names) for e in loops.around())
        here = {load for load, each in self.state.loads if each in around}
        return Here(
            around,
            loops.is_ending,
            loops.are_in_library,
            tuple(map(self.number_of, list(self._optimizers))),
            0 if self.last is None else self.number_of(self.last),
            tuple(filter(self._has_reached_trained, sorted(here))),
            self._held(),
            tuple(self._gone.popleft() for _ in range(len(self._gone))),
        )

    def _has_reached_trained(self, load: int) -> bool:
        there = (each() for each in self._reached[load])
        return self._is_trained([each for each in there if each is not None])

    def _is_trained(self, parameters: Iterable[torch.Tensor]) -> bool:
        return share(parameters, parameters_of(list(self.stepped)))


def _new_list(num_steps: int) -> TextIO | None:
    """Returns the file for this process's events, if it is asked for, which the run is for."""
    folder = os.environ.get(EVENTS)
    if not folder:
        return None
    path = Path(folder, f"{os.getpid()}.jsonl").absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    files = files_of_run()
    if files is not None:
        files.note_result(str(path))
    opened = path.open("w")
    print(json.dumps({"wanted": num_steps}), file=opened, flush=True)
    return opened


def parameters_of(optimizers: Iterable[Optimizer]) -> Iterable[torch.Tensor]:
    """Yields the parameters of optimizers."""
    groups = (group for each in optimizers for group in getattr(each, "param_groups", ()))
    return (parameter for group in groups for parameter in group["params"])


def share(tensors: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> bool:
    """Returns whether one of some tensors is one of others, or has its bytes."""
    ids, addresses = set(), {0}
    for each in others:
        ids.add(id(each))
        addresses.add(address_of(each))
    addresses.discard(0)
    return bool(ids) and any(id(each) in ids or address_of(each) in addresses for each in tensors)
