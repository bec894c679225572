"""Saves a training state again and again, and restores the newest whole one.

``save`` takes the bytes (``_capture``) and hands them to one thread, which writes and publishes
them (``_disk``) in the order of the calls. Invariant, which
``tests/checkpoint/test_failed_saves.py`` tries to break: a save is published whole or not at all,
and every failure is raised exactly once, where it cannot be missed.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any

from residency import _pinned
from residency._checkpoint import _rng
from residency._checkpoint._arguments import (
    check_count,
    check_metrics,
    check_seconds,
    check_state,
    check_step,
    retention,
    spare_bytes,
)
from residency._checkpoint._background import Background
from residency._checkpoint._capture._capture import Capture, check_verify, make_room
from residency._checkpoint._capture._walk import optimizers_in
from residency._checkpoint._disk._publish import CheckpointDirectory, Retention
from residency._checkpoint._disk._published import step_name
from residency._checkpoint._document._encode import check_is_finite
from residency._checkpoint._job import Job, Ranks
from residency._checkpoint._progress import follow, progress_bar
from residency._checkpoint._restore._attempts import Attempts
from residency._checkpoint._save import PUBLISHED, SKIPPED, Save, nobody_tells, raise_unreported
from residency._checkpoint._save_memory import SaveMemory, memory_for_next
from residency._errors import InvalidArgumentError, RefusedError, ResidencyError
from residency._modes import inference_mode_off
from residency._nesting import half_done, refuse_inside
from residency._transfer import SlabArena, owner_of, states_to_come

_POLICIES = ("wait", "skip", "replace")

_logger = logging.getLogger("residency")


class Checkpointer:
    """A directory of saves: writes a training state while training goes on, and restores it.

    A context manager; works without an accelerator too. In a job of several ranks, every rank makes
    one, at the same place of its program, and calls the same methods; the directory is on a file
    system that all of them share. Several threads may use one; their calls take turns.

    Args:
        directory: The folder of the saves; made at the first save.
        keep: How many of the newest saves stay, or a ``Retention`` that also keeps the best by a
            metric; None keeps all. Older ones go only when a newer one is published.
        max_in_flight: Saves that may be under way at once; each takes host memory of its own.
        policy: The action of ``save`` at that limit: ``"wait"`` for the oldest save, ``"skip"``
            this one, or ``"replace"`` the newest one that is not being written yet, after a check
            that this one is possible. Several ranks can only ``"wait"``.
        verify: ``"full"`` compares sums over all bytes on the device before and after the copies,
            and fails the save if other code wrote to them. ``"gate"`` checks only the state of an
            offloaded optimizer, which a save reads without a copy, and trusts that other code uses
            ``residency.mutating``. ``"read"`` also reads each save back before it is published.
        spare: Host bytes that the steps of an offloaded optimizer may take while a save still reads
            its state; a step that needs more waits for the disk. None is two buckets; ``"all"`` is
            a full second set: then no step waits.
        timeout_seconds: How long a rank waits for the others to make a checkpointer, restore or
            write. A rank that failed but may retry gets a tenth of this, at most 10 s.

    Raises:
        InvalidArgumentError: An argument is invalid.
        CheckpointError: Another rank made no checkpointer in time.

    Memory:
        Device: none; with ``verify="full"``, 8 bytes per 16 KiB and up to 32 KiB for each tensor,
        during the copies. Pinned host memory, kept until ``close``: for each save in flight, the
        bytes of the state, except state of offloaded optimizers (overlapping tensors: their common
        span once), each rounded up to 512 (to 4096 above 64 KiB), plus the unused rest of a power
        of two; and ``spare``. Host: four chunks of 4 MiB to write from.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int | Retention | None = None,
        max_in_flight: int = 1,
        policy: str = "wait",
        verify: str = "gate",
        spare: int | str | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        self._retention = retention(keep)
        check_count("max_in_flight", max_in_flight)
        if policy not in _POLICIES:
            raise InvalidArgumentError(f"policy is {policy!r}; expected one of {_POLICIES}.")
        self._is_verified = check_verify(verify, "read")
        self._spare_bytes = spare_bytes(spare)
        self._policy = policy
        self._timeout_seconds = check_seconds("timeout_seconds", timeout_seconds)
        self._ranks = Ranks(self._timeout_seconds)
        if self._ranks.world_size > 1 and policy != "wait":
            raise InvalidArgumentError(
                f"policy is {policy!r} in a job of {self._ranks.world_size} ranks, which would "
                "decide each for itself; expected 'wait'."
            )
        self._directory = CheckpointDirectory(directory, reads_back=verify == "read")
        self._memories = [SaveMemory() for _ in range(max_in_flight)]
        self._background = Background("residency-save")
        self._filling: Job | None = None  # the job of a call that is not over
        self._num_saves = 0
        self._last_call: tuple[object, int] = None, 0  # of ``save``: the step, and the number
        self._is_closed = False
        self._has_ended = False
        self._process = os.getpid()
        self._lock = threading.RLock()  # calls take turns
        # One that is never closed leaves no lock behind.
        weakref.finalize(self, self._directory.unlock).atexit = False

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"A save had failed, too: {failure}")

    def prepare(self, state: object) -> None:
        """Allocates and pins the memory for saves of this state now, so that the first save is as
        quick as the tenth.

        Args:
            state: The same state as for ``save``. Optimizer states that do not exist yet are
                counted as the first step will make them, if that can be foreseen.

        Raises:
            RefusedError: Something in the state cannot be saved, or the host has no room.
        """
        self._check_open("prepare")
        with self._lock:
            self._prepare(state)

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, float] | None = None,
        rng: bool = True,
        progress: bool = False,
    ) -> Save:
        """Saves a state as it is now; returns when its bytes are copied or on their way.

        Training may go on at once; ``residency.snapshot`` says who waits for the copies.

        Args:
            step: The number of the save; one that exists is replaced when this one is whole.
            state: Modules, optimizers, LR schedulers, ``GradScaler``, whatever has ``state_dict``
                and ``load_state_dict``, tensors, arrays, plain values, and containers of all these,
                by name. Host tensors and Python values are copied in the call.
            metrics: Figures that a ``Retention`` may choose by, read in the call.
            rng: Whether the random number generators are saved, too.
            progress: Whether to wait until the save is published, behind a progress bar.

        Returns:
            The save on its way.

        Raises:
            InvalidArgumentError: An argument is invalid.
            RefusedError: Something in the state cannot be saved, another process writes into the
                directory, the directory cannot be written to, or the disk or the host has no room.
            CheckpointError, OSError: An earlier save failed. This one was not begun; the next call
                begins one. With several ranks it was begun: they may raise in different calls.
        """
        self._check_open("save")
        begun = time.perf_counter()
        with self._lock:
            save = self._save(step, state, metrics, rng, begun)
        if progress:
            with progress_bar(
                f"saving step {step}", lambda: save._num_bytes, is_shown=True
            ) as advance:
                follow(save, advance)
            save.wait()
        return save

    def restore(
        self,
        state: Mapping[str, object],
        *,
        step: int | None = None,
        strict: bool = True,
        rng: bool = True,
        eager: bool = False,
        progress: bool = False,
    ) -> int:
        """Fills a state in place from a save.

        Tensors get the saved bytes in place; identity, ties, hooks and shards are kept. An
        offloaded optimizer's state goes to its homes on the host. A plain optimizer's state waits
        on the host until its first use: a step or any read of ``optimizer.state``, also by
        ``copy.deepcopy``. Then it moves to the device. If an object has its own
        ``load_state_dict``, or hooks on it, it is called when the tensors are in place. Every chunk
        that is read is checked. All ranks restore the same save, or none does.

        Args:
            state: The state that ``save`` took, or a part of it. Mappings, lists and arrays in it
                are filled in place, too; one object under two names is filled once.
            step: Which save; None is the newest whole one: if that turns out to be damaged, the
                one before it is restored, with a warning.
            strict: Whether names, shapes and dtypes that do not match are refused; else they are
                left out, with a warning.
            rng: Whether the random number generators are restored, too.
            eager: Whether a plain optimizer's state goes onto the device at once; the state of a
                class that copies or pickles itself in a way of its own always does.
            progress: Whether to draw a progress bar.

        Returns:
            The step of the save.

        Raises:
            RefusedError: There is no save, or it does not fit the state, here or on another rank;
                nothing was changed. Or there is no room; nothing was changed on this rank.
            CheckpointError: Another rank did not call it in time, or failed.
            CorruptSaveError: The save is damaged, or all are. If the bytes of a file are damaged,
                tensors may hold some of them; if a value makes no sense, nothing was changed.

        Memory:
            Device: the ring (64 MiB) at the most, and no state of an optimizer unless ``eager``, or
            it has methods of its own. Host: the ring, and offloaded optimizers' state. Other
            values, which an object's own method loads, are on both twice until it returns.
        """
        self._check_open("restore")
        if step is not None:
            step = check_step(step)
        with self._lock:
            attempts = Attempts(self._directory, self._ranks, state, strict, rng, eager, progress)
            return self._restore(attempts, step)

    def steps(self) -> list[int]:
        """Returns the steps of the published saves, ascending."""
        return self._directory.steps()

    def wait(self) -> None:
        """Blocks until no save is on its way, and old saves that are not kept are removed.

        Raises:
            CheckpointError, OSError: A save failed, and no call has raised that yet.
        """
        self._check_process()
        self._check_is_no_inner_call("wait")
        with self._lock:
            self._give_up_unfinished()
            self._background.drain()
            raise_unreported(self._directory.path)

    def close(self) -> None:
        """Waits for pending saves, then gives memory and directory back; a second call is a no-op.

        Raises:
            CheckpointError, OSError: A save failed, and no call has raised that yet.
        """
        if self._has_ended or self._is_too_late() or os.getpid() != self._process:
            return
        self._check_is_no_inner_call("close")
        with self._lock:  # each line again without effect, after an interrupt
            self._give_up_unfinished()
            self._is_closed = True
            self._background.end()
            pinned_bytes = sum(memory.arena.pinned_bytes for memory in self._memories)
            self._memories.clear()
            self._directory.unlock()
            _pinned.give_back_pinned(pinned_bytes)
            self._has_ended = True
            raise_unreported(self._directory.path)

    @half_done("a prepare", of_object=True)
    def _prepare(self, state: object) -> None:
        self._give_up_unfinished()
        self._use_directory()
        looked_at = Capture(SlabArena(pin=False))
        try:
            looked_at.describe(self._with_rng(state, True), rank=self._ranks.rank_to_write)
            blocks = looked_at.blocks.blocks
            sizes = [block.num_bytes for block in blocks if block.lent is None]
            is_on_device = any(not block.source.is_cpu for block in blocks)
        finally:
            looked_at.release()
        for optimizer in optimizers_in(state):
            self._set_spare(optimizer)
            groups = optimizer.param_groups
            is_on_device |= any(not p.is_cpu for group in groups for p in group["params"])
            sizes += [like.numel() * like.element_size() for like in states_to_come(optimizer)]
        for memory in self._memories:
            if memory.is_free:
                memory.arena = memory.emptied()
                memory.arena.pin_for(is_on_device)
                for region in make_room(memory.arena, sizes):
                    region.touch()

    @half_done("a restore", of_object=True)
    def _restore(self, attempts: Attempts, step: int | None) -> int:
        self._give_up_unfinished()
        self._background.drain()
        with inference_mode_off():
            return attempts.restore(step)

    @half_done("a save", of_object=True)
    def _save(
        self,
        step: int,
        state: Mapping[str, object],
        metrics: Mapping[str, float] | None,
        rng: bool,
        begun: float,
    ) -> Save:
        self._give_up_unfinished()
        if self._ranks.world_size == 1:
            raise_unreported(self._directory.path)
        self._num_saves += 1
        self._last_call = step, self._num_saves
        try:
            number = check_step(step)
            check_state(state, rng)
            figures = check_metrics(metrics)
            save = Save(number, self._directory.path / step_name(number), self)
            job = self._begin(save, state, figures, rng, begun)
        except BaseException as error:
            self._give_up_unfinished()
            self._directory.give_up(self._ranks.request(step, self._num_saves), error)
            raise
        if self._ranks.world_size > 1 or nobody_tells():
            raise_unreported(self._directory.path)
        if job is None:
            save._outcome.set(SKIPPED)
        return save

    def _begin(
        self,
        save: Save,
        state: Mapping[str, object],
        metrics: Mapping[str, float],
        rng: bool,
        begun: float,
    ) -> Job | None:
        """Takes the bytes and hands them to the writer; returns None for a save that is skipped.

        [Note: whose a job is]
        """
        self._use_directory()
        self._background.start()
        memory = memory_for_next(self._memories, self._policy)
        if memory is None:
            return None
        job = Job(save, memory.arena, metrics, self._num_saves)
        self._filling = job
        if self._spare_bytes is not None:
            check_is_finite(state)  # as describing it does, which must come later
            for optimizer in optimizers_in(state):
                self._set_spare(optimizer)
        job.describe(self._with_rng(state, rng), rank=self._ranks.rank_to_write)
        if self._ranks.rank == 0:
            self._directory.check_writable(job.num_bytes)
        self._take_memory(memory, job)
        job.copy()
        job.begun = time.perf_counter()
        pinned_bytes = sum(each.arena.pinned_bytes for each in self._memories)
        save._figures = job.figures(job.begun - begun, pinned_bytes)
        job.is_handed = True
        self._background.hand(partial(self._write, job))
        self._filling = None
        return job

    def _take_memory(self, memory: SaveMemory, job: Job) -> None:
        """Makes room for a job; a save that gives way does so when there is room."""
        before = memory.job
        while before is not None and not before.save.is_done():
            with before.claim:
                if not before.is_begun:
                    self._make_room(memory, job)
                    before.skip()
                    memory.job = job
                    return
            before.save._outcome.wait()  # the writer came first
        self._make_room(memory, job)
        memory.job = job

    def _make_room(self, memory: SaveMemory, job: Job) -> None:
        arena = memory.emptied()
        job.captured.arena = arena
        job.captured.make_room(verify=self._is_verified)
        memory.arena = arena

    def _give_up_unfinished(self) -> None:
        """Ends what a call left that did not come to its end. [Note: whose a job is]"""
        job = self._filling
        if job is None:
            return
        if job.is_handed:  # the thread may not know yet; a job that it had is not written again
            self._background.start()
            self._background.hand(partial(self._write, job))
        else:
            job.finish()
        self._filling = None

    def _write(self, job: Job) -> None:
        """Writes and publishes one save; runs on the writer's thread."""
        if job.begin():
            job.write(
                self._directory, self._ranks, self._timeout_seconds, partial(self._is_repeated, job)
            )
            if job.save._outcome.value is PUBLISHED:
                self._retire(job.save.step)

    def _is_repeated(self, job: Job) -> bool:
        """Returns whether the step of a job was asked for again, by the newest call of ``save``."""
        step, number = self._last_call
        return bool(step == job.save.step and number > job.number)

    def _retire(self, step: int) -> None:
        """Removes what the retention does not keep. The save counts already, and no caller waits
        for the disk to let go of an old one, but for ``wait`` and ``close``.
        """
        if self._ranks.rank != 0 or self._retention is None:
            return
        try:
            self._directory.apply(self._retention, spare=step)
        except (OSError, ResidencyError) as error:  # old ones go another time
            _logger.warning(
                "an old save in %s could not be removed: %s", self._directory.path, str(error)
            )

    def _use_directory(self) -> None:
        if self._ranks.rank == 0 and not self._directory.is_locked:
            # The directory was removed: a save on its way still holds the old lock.
            self._background.drain()
            self._directory.unlock()
            self._directory.lock()
            self._directory.clean_up()

    def _set_spare(self, optimizer: object) -> None:
        owner = owner_of(optimizer)
        if owner is not None:
            owner.set_spare(optimizer, self._spare_bytes)

    def _with_rng(self, state: Any, rng: bool) -> Any:
        # A plain dict, of whatever class the state is: each name in it has a file.
        return {**state, _rng.RNG: _rng.random_states()} if rng else dict(state)

    def _check_open(self, call: str, refused: type[Exception] = RefusedError) -> None:
        if self._is_too_late():
            raise refused(  # an argument, because this module's names are gone by then
                f"{call} was called while Python takes its modules apart, by a finalizer, when no "
                f"thread runs any more. Nothing was done; call {call} in an exit handler (atexit)."
            )
        if self._is_closed:
            raise RefusedError(
                f"this checkpointer of {str(self._directory.path)!r} is closed; make another one."
            )
        self._check_process()
        self._check_is_no_inner_call(call)

    def _is_too_late(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> bool:
        """Returns whether modules may be empty by now: the saves of before are written."""
        return is_finalizing()

    def _check_is_no_inner_call(self, call: str) -> None:
        """Raises RefusedError where this thread could not go on: it would wait for itself."""
        refuse_inside(call, self)
        if self._background.is_current():
            raise RefusedError(
                f"{call} was called on the thread that writes the saves of {self._directory.path}, "
                f"by a finalizer or a callback. Nothing was done; call {call} on a thread of your "
                "own."
            )

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RefusedError(
                f"this checkpointer of {str(self._directory.path)!r} belongs to process "
                f"{self._process}, from which this one was forked; expected calls there. Nothing "
                "was done."
            )
