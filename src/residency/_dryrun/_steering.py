"""Decides when enough was seen of a script's training, from what has happened alone.

``advance`` takes the state and an event, and returns the next state and what is to be done. It
knows no tensor, frame or optimizer: each is a number that the listeners (``_stopping``,
``_loaders``, ``_reaching``) give it, and what only a look at the process says comes with the event.
So a run is a list of events, which is tried without torch (`tests/dryrun/test_steering.py`).

Once the wanted steps are made, the loops that led to the last one have no further round: what comes
after them (evaluation, the last save, a resume) then runs as the script has it. A loop in which the
optimizer was made goes on, as of folds: each of its rounds trains anew. Once the loops are over, a
backward pass begins the next training, which makes its own steps.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from residency._units import MIB

BY_HAND = 0  # the number of what steps where a script changes its parameters itself
STEPS_OF_GROWTH = 6  # in which growth shows (`_growing`)
_MOST_RESUMES = 3  # of a loop that loads in its rounds
_MOST_TRAININGS = 10  # until a loop that makes an optimizer in each round is ended, too
_PATIENCE = 10  # times the steps that were asked for, until each optimizer has made as many
_MUCH = MIB  # more after a step than after the one before: it may go on so
_MOST_FREE_PASSES = 20  # backward ones without an optimizer, which may come yet
_MOST_SHORT_PASSES = 100  # of an evaluation, until the loops around it are ended
_EVEN_BATCHES = 32  # of an evaluation, after which it ends where they have left nothing behind
_EVEN_BYTES = MIB  # a loss of each batch is nothing; logits are more
_MOST_EMPTY_PASSES = 1000  # in a library's loop that waits for a batch


class Round(NamedTuple):
    """A loop around an event, and its round."""

    loop: int
    number: int  # of the round
    has_names: bool = False  # as of phases: each round does something else


class Here(NamedTuple):
    """The process, as a look at an event says."""

    around: tuple[Round, ...] = ()  # the loops that led here, the innermost first
    are_ending: bool = False  # one that has no further round is under way
    in_library: bool = False  # whose loops were ended last, and that has not returned yet
    optimizers: tuple[int, ...] = ()  # those that there are
    loader: int = 0  # that gave out a batch last; 0 for none, or where that was its last one
    trained: tuple[int, ...] = ()  # of the loads in `Steering.loads` those into what is trained
    held: int = 0  # bytes of tensors on the device
    gone: tuple[int, ...] = ()  # since the event before: optimizers, loaders, iterators


class Happened(NamedTuple):
    """Something that has happened: the name of a method of `Steering`, and what that takes."""

    kind: str
    here: Here
    facts: tuple[Any, ...] = ()


@dataclass(slots=True)
class Do:
    """The consequences of an event, in their order."""

    go_on: bool = False  # loops that are in their last round get further ones
    end: tuple[int, ...] = ()  # loops that have no further round
    stop_trainers: bool = False  # of frameworks
    no_batch: bool = False  # a loader gives none, and no pass
    has_enough: bool = False  # an evaluation, which is why
    leave: bool = False  # the script, in the middle of its loop


@dataclass(frozen=True, slots=True)
class SeenOptimizer:
    """An optimizer, as far as it decides."""

    made_in: tuple[Round, ...] = ()  # the loops around the place where it was made
    is_new: bool = False  # it was made since the training has ended
    count: int = 0  # of its steps in this training
    since_load: int = 0  # of its steps
    held: int | None = None  # bytes after the last of these
    is_ahead: bool = False  # it has made a step since the end
    trainings: frozenset[int] = frozenset()  # before this one, in which it has stepped


_NEVER = SeenOptimizer()


@dataclass
class Steering:
    """The state that decides; each of its methods with a public name is an event."""

    wanted: int  # steps of each training; 0 for never to end one
    here: Here = field(default_factory=Here)  # at the last event
    do: Do = field(default_factory=Do)  # after it
    num_steps: int = 0  # added up, of the optimizer that has made the most
    num_counts: int = 0  # begun, with each training and load
    num_before_load: int = 0  # steps
    asked: int = 0  # steps of this count, where it needs more than are wanted
    is_ending: bool = False  # enough was seen, and no other training has begun
    was_ended: bool = False  # any training, after enough steps
    was_left: bool = False  # the script, in the middle of its loop
    has_ended_loops: bool = False  # as this training has ended
    has_framework: bool = False  # that says when a training begins
    num_trainings: int = 0  # that have ended
    num_resumes: int = 0
    num_late: int = 0  # steps after the end
    num_by_hand: int = 0  # passes
    is_new: bool = False  # a file was read since copies of one were a resume
    seen: dict[int, SeenOptimizer] = field(default_factory=dict)  # by the optimizers' numbers
    loads: tuple[tuple[int, Round], ...] = ()  # into what is not trained yet, and loops around them
    of_steps: frozenset[int] = frozenset()  # loaders
    have_ended: bool = False  # loaders, which gave a library's loop that trains nothing more
    num_cut: int = 0  # passes of evaluations that have ended early
    num_empty_passes: int = 0
    passes: dict[int, int] = field(default_factory=dict)  # over each loader, since the end
    # Of each iterator, since the end: its pass, batches of it, and what was held at some batch.
    given: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    # -------------------------------------------------------------------------- what it says

    @property
    def steps_of_training(self) -> tuple[int, int]:
        """Which count it is, anew with each training and load, and the steps in all."""
        return self.num_counts, self.num_steps

    @property
    def is_by_hand(self) -> bool:
        """Whether backward passes are counted, as there is no optimizer."""
        return self._of(BY_HAND).count > 0

    @property
    def _has_left_loops(self) -> bool:
        """Whether the loops are over that were ended with the training."""
        return self.has_ended_loops and not self.here.are_ending

    @property
    def _is_past(self) -> bool:
        """Whether the script has left the loops of the training that has ended."""
        return self._has_left_loops and not self.here.in_library

    def _of(self, optimizer: int) -> SeenOptimizer:
        return self.seen.get(optimizer, _NEVER)

    def _note(self, optimizer: int, **changes: Any) -> None:
        self.seen[optimizer] = replace(self._of(optimizer), **changes)

    # ---------------------------------------------------------------------------- optimizers

    def made(self, optimizer: int) -> None:
        """Keeps the loops around an optimizer that was made, and for which training it is."""
        self._note(optimizer, made_in=self.here.around)
        if self.is_ending and not self.here.are_ending:
            self._note(optimizer, is_new=True)

    def stepping(self, optimizer: int) -> None:
        """Begins the next training with a step to come, or leaves one that does not end."""
        self._see_optimizers()
        if self._is_past or self._of(optimizer).is_new:
            self._begin_training()
        if not self.is_ending:
            return
        self.num_late += 1
        # They are in their last round, unless a library has begun them anew.
        if not self._has_left_loops and (self.here.are_ending or self._end_loops()):
            is_known = self.num_late <= _PATIENCE * self.wanted
        else:  # a loader that is over may have given out one more batch, to who looks ahead
            is_known = bool(self.of_steps) and not self._of(optimizer).is_ahead
        self.do.leave = not is_known
        if is_known:
            self._note(optimizer, is_ahead=True)

    def stepped(self, optimizer: int, to_fill: int = 0) -> None:
        """Counts a step, the first with those that fill a history, and ends the training after
        enough.
        """
        before = self._of(optimizer)
        count, since = before.count + 1, before.since_load + 1
        self._note(optimizer, count=count, since_load=since, held=self.here.held)
        self.num_steps = max(self.num_steps, self.num_before_load + since)
        self.of_steps |= {self.here.loader} - {0}
        self.asked = max(self.asked, to_fill)
        has_grown = before.held is not None and self.here.held - before.held >= _MUCH
        if count == self.wanted and has_grown:  # whether that goes on shows in these
            self.asked = STEPS_OF_GROWTH
        if self.wanted and not self.is_ending and self._has_seen_enough(count):
            self.is_ending = self.was_ended = self.do.stop_trainers = True
        if self.is_ending and count >= self.wanted:
            self._end_loops()

    def backward(self) -> None:
        """Begins the next training with its first backward pass, and takes one for a step where a
        script has made many, and no optimizer.

        Some scripts run backward passes before they make their optimizer (gradient-based
        initialisation). Training restarts at that optimizer's first step.
        """
        if self._is_past or any(each.is_new for each in self.seen.values()):
            self._begin_training()
        if self.here.optimizers:
            return
        self.num_by_hand += 1
        if self.num_by_hand > _MOST_FREE_PASSES:
            self.stepping(BY_HAND)
            if not self.do.leave:
                self.stepped(BY_HAND)

    def begun(self) -> None:
        """Begins the next training, as a framework says."""
        self.has_framework = True
        self._begin_training()

    def _begin_training(self) -> None:
        """Counts the steps of another training, where one has ended."""
        if not self.is_ending:
            return
        self.is_ending = self.has_ended_loops = False
        for number, each in self.seen.items():
            of = each.trainings | ({self.num_trainings} if each.count else set())
            self.seen[number] = SeenOptimizer(made_in=each.made_in, trainings=frozenset(of))
        self.num_trainings += 1
        self.num_late = self.num_empty_passes = 0
        self.of_steps = frozenset()
        self.passes.clear()
        self.given.clear()
        self._count_from_here()

    def _count_from_here(self) -> None:
        self.num_counts += 1
        self.asked = 0
        self.num_before_load = self.num_steps
        for number in self.seen:
            self._note(number, since_load=0, held=None)

    def _see_optimizers(self) -> None:
        """Begins training anew where an optimizer was made after passes that were counted."""
        if self.is_by_hand and self.here.optimizers:
            self.num_steps = 0
            self.is_ending, self.was_ended = True, False
            self._begin_training()

    def _has_seen_enough(self, count: int) -> bool:
        """Returns whether the steps are made: by each of a GAN's optimizers, too."""
        goal = max(self.wanted, self.asked)
        if count < goal:
            return False
        used = filter(self._is_used, self.here.optimizers)
        return all(self._of(each).count >= goal for each in used) or count >= _PATIENCE * goal

    def _is_used(self, optimizer: int) -> bool:
        """Returns whether an optimizer may step in this training: it has not in one before, or it
        has beside one that does now.
        """
        before = self._of(optimizer).trainings
        return not before or any(e.count and e.trainings & before for e in self.seen.values())

    def _end_loops(self) -> bool:
        """Ends the loops that led here, each after this round of it; returns whether there is one.

        One goes on if in this round the optimizer was made, or what it trains was loaded before
        its first step: the next one trains anew.
        """
        self._end(lambda each: not (self._has_made(each) or self._has_loaded(each)))
        self.has_ended_loops |= bool(self.do.end)
        return bool(self.do.end)

    def _end(self, is_ended: Callable[[Round], bool]) -> None:
        """Ends loops; one that goes over names goes on, unless it is the innermost."""
        around = enumerate(self.here.around)
        self.do.end = tuple(e.loop for n, e in around if is_ended(e) and not (n and e.has_names))

    def _has_made(self, now: Round) -> bool:
        made = (each.made_in for each in self.seen.values() if each.count)
        return self.num_trainings < _MOST_TRAININGS and any(now in each for each in made)

    def _has_loaded(self, now: Round) -> bool:
        loads = {load for load, each in self.loads if each == now}
        is_trained = self.is_by_hand or not loads.isdisjoint(self.here.trained)
        return bool(loads) and is_trained and now.number <= _MOST_RESUMES

    # --------------------------------------------------------------------------------- loads

    def loaded(self, is_whole: bool = False) -> None:
        """Counts anew after a load, as the script may train what it has loaded, and resumes after
        one of the whole run; `reached` says what other loads reach.
        """
        if is_whole:
            self._resume()
        else:
            self._count_from_here()

    def read(self) -> None:
        """Waits for a copy of a file that was read, into what is trained."""
        self.is_new = True

    def reached(self, load: int, is_trained: bool, is_copied: bool = False) -> None:
        """Resumes where a load has reached what is trained; of copies the first one does so.

        Of a load before the first step of a training the loops around it are noted: whether it
        has reached what is trained is seen later.

        Args:
            load: Its number.
            is_trained: Whether an optimizer has stepped one of its parameters.
            is_copied: Whether it was copied into one tensor, as a script does with each.
        """
        if is_copied and not self.is_new:
            return
        if self._is_past or not any(each.count for each in self.seen.values()):
            now = {each.loop: each for each in self.here.around}
            still = (each for each in self.loads if now.get(each[1].loop, each[1]) == each[1])
            self.loads = (*still, *((load, each) for each in self.here.around))
        if is_trained or self.is_by_hand:
            self.is_new &= not is_copied
            self._resume()

    def _resume(self) -> None:
        """Counts anew: the script has loaded a checkpoint into what it trains.

        Loops that are in their last round go on. A training of their own begins by itself, as one
        of a framework does.
        """
        self._count_from_here()
        if not self.is_ending or self._is_past or self.has_framework:
            return
        if self.num_resumes < _MOST_RESUMES:
            self.num_resumes += 1
            self.do.go_on = True
            self._begin_training()

    # ------------------------------------------------------------------------------- loaders

    def passing(self, loader: int, for_script: bool, counts: bool = True) -> None:
        """Gives no pass over a loader that is over, and ends evaluations without end.

        Args:
            loader: Its number.
            for_script: Whether the pass is for the script, and not for a loop of a library.
            counts: Whether no generator of the loader's own, around this pass, does so.
        """
        if self._is_over(loader, for_script):
            self.do.no_batch = True
            self.num_empty_passes += 1  # `while step < last: for batch in loader` has no end
            self.do.leave = self.num_empty_passes > _MOST_EMPTY_PASSES
        elif self.is_ending and counts:
            self.passes[loader] = self.passes.get(loader, 0) + 1
            if self.passes[loader] > _MOST_SHORT_PASSES:
                self._end(lambda each: True)

    def asked_batch(self, loader: int, iterator: int, for_script: bool) -> None:
        """Gives no batch of a loader that is over, or to an evaluation that has enough.

        That is one after the first pass, for those who divide by how many there were, and of the
        first pass as many as show that they leave nothing on the device.
        """
        self.do.no_batch = self._is_over(loader, for_script)
        if self.do.no_batch or not self.is_ending:
            return
        number_of_pass = self.passes.get(loader, 0)
        of_pass, number, held = self.given.get(iterator, (number_of_pass, 0, self.here.held))
        if of_pass != number_of_pass:  # of an iterator that is one for all passes
            number = 0
        is_even = number % _EVEN_BATCHES == 0
        is_enough = number_of_pass > 1 or (is_even and self.here.held - held < _EVEN_BYTES)
        if number and is_enough:
            self.do.no_batch = self.do.has_enough = True
            self.num_cut += 1
        else:
            self.given[iterator] = number_of_pass, number + 1, self.here.held if is_even else held

    def _is_over(self, loader: int, for_script: bool) -> bool:
        """Returns whether a loader gives nothing more: it is a library's that trains."""
        self._see_optimizers()
        is_ended = self.is_ending and not self._is_past
        is_over = is_ended and loader in self.of_steps and not for_script
        self.have_ended |= is_over
        return is_over


def advance(state: Steering, event: Happened) -> tuple[Steering, Do]:
    """Returns the state after an event, and what is to be done; the state before it stays."""
    after = copy(state)
    after.here, after.do = event.here, Do()
    after.seen, after.passes, after.given = dict(state.seen), dict(state.passes), dict(state.given)
    after.of_steps -= set(event.here.gone)
    for number in event.here.gone:
        for table in (after.seen, after.passes, after.given):
            table.pop(number, None)
    getattr(after, event.kind)(*event.facts)
    after.was_left |= after.do.leave
    return after, after.do
