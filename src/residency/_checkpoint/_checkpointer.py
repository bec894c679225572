"""Saves a training state again and again, and restores the newest whole one.

``save`` takes the bytes (``_capture``) and hands them to one thread, which writes and publishes
them (``_disk``) in the order of the calls. Invariant: a save is published whole or not at all, and
every failure is told exactly once, where it cannot be missed.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from residency import _device
from residency._checkpoint import _rng
from residency._checkpoint._arguments import (
    RNG,
    check_count,
    check_seconds,
    check_state,
    retention,
    spare_bytes,
)
from residency._checkpoint._blocks import make_blocks
from residency._checkpoint._capture import Capture, capture, check_verify, make_room, sizes_of
from residency._checkpoint._disk._layout import step_name
from residency._checkpoint._disk._publish import CheckpointDirectory, Retention
from residency._checkpoint._encode import check_is_finite
from residency._checkpoint._job import Job, Ranks
from residency._checkpoint._progress import follow, progress_bar
from residency._checkpoint._restore._state import PlannedState, plan_state
from residency._checkpoint._save import Save, let_locals_go, unreported
from residency._checkpoint._tree import describe, end_loans, optimizers_in
from residency._errors import CorruptSaveError, InvalidArgumentError, RefusedError, ResidencyError
from residency._transfer import SlabArena, owner_of, states_to_come

_POLICIES = ("wait", "skip", "replace")

_logger = logging.getLogger("residency")


class Checkpointer:
    """Saves a training state into a directory, beside training, and restores it.

    A context manager; works without an accelerator too. In a job of several ranks, every rank makes
    one, at the same place of its program, and calls the same methods; the directory is on a file
    system that all of them share.

    Args:
        directory: Where the saves are; made at the first save.
        keep: How many of the newest saves stay, or a ``Retention`` that also keeps the best by a
            metric; None keeps all. Older ones go only when a newer one is published.
        max_in_flight: Saves that may be under way at once; each takes host memory of its own.
        policy: What ``save`` does when that many are: ``"wait"`` for the oldest, ``"skip"`` this
            one, or ``"replace"`` the newest one that is not yet being written (of several ranks,
            only ``"wait"``, which decides the same on all).
        verify: ``"full"`` compares sums over all bytes on the device before and after they are
            copied, and fails a save that somebody wrote into; ``"gate"`` trusts that all writers
            pass the gate or use ``residency.mutating``.
        spare: Host bytes that the steps of an offloaded optimizer may take while a save still reads
            its state; a step that needs more waits for the disk. None is two buckets; ``"all"`` a
            full second set, with which no step ever waits.
        timeout_seconds: How long a rank that has written its share waits for the others; one that
            says that it failed is not waited for.

    Raises:
        InvalidArgumentError: An argument means nothing.

    Memory:
        Device: none; with ``verify="full"``, 8 bytes per 16 KiB and up to 32 KiB for each tensor,
        during the copies. Pinned host memory, kept until ``close``: for each save in flight, the
        bytes of the state but for what offloaded optimizers lend, of overlapping tensors their
        common span once, each rounded up to 512 (to 4096 above 64 KiB), plus what is left at the
        end of a power of two; and ``spare``. Host: four chunks of 4 MiB to write from.
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
        self._is_verified = check_verify(verify)
        self._spare_bytes = spare_bytes(spare)
        self._policy = policy
        self._timeout_seconds = check_seconds("timeout_seconds", timeout_seconds)
        self._ranks = Ranks()
        if self._ranks.world_size > 1 and policy != "wait":
            raise InvalidArgumentError(
                f"policy is {policy!r} in a job of {self._ranks.world_size} ranks, which would "
                "decide each for itself; expected 'wait'."
            )
        self._directory = CheckpointDirectory(Path(directory))
        self._arenas = [
            SlabArena(pin=_device.is_pinning_available(), keep=True) for _ in range(max_in_flight)
        ]
        self._free_arenas = list(self._arenas)
        self._on_their_way: list[Job] = []
        self._writer: ThreadPoolExecutor | None = None
        self._num_saves = 0
        self._is_closed = False
        self._process = os.getpid()
        # Whoever forgets to close it leaves no lock behind.
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

    def prepare(self, state: Any) -> None:
        """Allocates and pins now what saves of this state take, so that the first is as quick as
        the tenth.

        Args:
            state: What ``save`` will be given. Optimizer states that do not exist yet are
                counted as the first step will make them, where that can be foreseen.

        Raises:
            RefusedError: Something in the state cannot be saved, or the host has no room.
        """
        self._use_directory()
        description = describe(self._with_rng(state, True))
        try:
            for optimizer in optimizers_in(state):
                self._set_spare(optimizer)
            blocks = make_blocks(
                description.leaves,
                replicated=description.replicated,
                rank=self._ranks.rank_to_write,
            )
            sizes = sizes_of(blocks.blocks)
            for optimizer in optimizers_in(state):
                sizes += [like.numel() * like.element_size() for like in states_to_come(optimizer)]
            for arena in self._free_arenas:
                for region in make_room(arena, sizes):
                    region.touch()
                    arena.release(region)
        finally:
            end_loans(description.leaves.values())

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

        Training may go on at once; see ``residency.snapshot`` for what waits for what.

        Args:
            step: The number of the save; one that exists is replaced when this one is whole.
            state: Modules, optimizers, LR schedulers, ``GradScaler``, whatever has ``state_dict``
                and ``load_state_dict``, tensors, arrays, plain values, and containers of all these,
                by name. Host tensors and Python values are copied in the call.
            metrics: Figures that a ``Retention`` may choose by.
            rng: Whether the random number generators are saved, too.
            progress: Whether to wait until the save is published, behind a progress bar.

        Returns:
            The save on its way.

        Raises:
            InvalidArgumentError: An argument means nothing.
            RefusedError: Something in the state cannot be saved, another process writes into the
                directory, it cannot be written to, or it or the host has no room.
            CheckpointError, OSError: An earlier save failed. This one was not begun, and the next
                one will be; of several ranks, which may be told at different calls, this one was.
        """
        begun = time.perf_counter()
        self._check_open()
        if self._ranks.world_size == 1:
            self._raise_failure()
        self._num_saves += 1  # on every rank, whatever comes
        token = self._ranks.token_of(self._num_saves)
        try:
            check_state(step, state, rng)
            job = self._begin(step, state, dict(metrics or {}), rng, token, begun)
        except BaseException as error:
            self._directory.give_up(self._ranks.request(step, token), error)
            raise
        if self._ranks.world_size > 1:
            self._raise_failure()
        if job is None:
            return Save(step, self._directory.path / step_name(step), is_skipped=True)
        if progress:
            with progress_bar(f"saving step {step}", job.num_bytes, is_shown=True) as advance:
                follow(job.save, advance)
            job.save.wait()
        return job.save

    def restore(
        self,
        state: Mapping[str, Any],
        *,
        step: int | None = None,
        strict: bool = True,
        rng: bool = True,
        eager: bool = False,
        progress: bool = False,
    ) -> int:
        """Fills a state in place from a save.

        Tensors get the saved bytes where they are; identity, ties, hooks and shards are kept. An
        offloaded optimizer's state goes to its homes on the host; a plain one's waits on the host
        and goes onto the device at the first step. Every chunk that is read is checked. All ranks
        restore the same save, or none does.

        Args:
            state: What was given to ``save``, or a part of it. Mappings and lists in it are filled
                in place, too.
            step: Which save; None is the newest whole one: where one turns out to be damaged, the
                one before it is restored, with a warning.
            strict: Whether names, shapes and dtypes that do not match are refused; else they are
                left out, with a warning.
            rng: Whether the random number generators go back, too.
            eager: Whether a plain optimizer's state goes onto the device at once.
            progress: Whether to draw a progress bar.

        Returns:
            The step of the save.

        Raises:
            RefusedError: There is no save, or it does not fit the state, here or on another rank;
                nothing was changed. Or there is no room; nothing was changed on this rank.
            CorruptSaveError: The save is damaged, or all are. Tensors may hold some of its bytes.

        Memory:
            Device: the ring (64 MiB) at the most, and no state of an optimizer unless ``eager``.
            Host: the ring, and what optimizers need to live.
        """
        self._check_open()
        self._drain()
        for candidate in self._candidates(step):
            try:
                self._restore_step(candidate, state, strict, rng, eager, progress)
            except CorruptSaveError as error:
                if step is not None:
                    raise
                damaged = error
                warnings.warn(f"{error} An older save is tried.", stacklevel=2)
            else:
                return candidate
        raise damaged

    def _candidates(self, step: int | None) -> list[int]:
        steps = self._ranks.of_first(self.steps)
        if not steps:
            raise RefusedError(
                f"{str(self._directory.path)!r} has no published save; steps() is empty. Nothing "
                "was changed."
            )
        if step is not None and step not in steps:
            raise RefusedError(
                f"{str(self._directory.path)!r} has no save of step {step}; it has {steps}. "
                "Nothing was changed."
            )
        return steps[::-1] if step is None else [step]

    def _restore_step(
        self, step: int, state: Any, strict: bool, rng: bool, eager: bool, progress: bool
    ) -> None:
        made: list[PlannedState] = []

        def plan() -> int:
            save = self._directory.open(step)
            planned = plan_state(
                state,
                save,
                rank=self._ranks.rank,
                world_size=self._ranks.world_size,
                strict=strict,
                rng=rng,
                eager=eager,
            )
            made.append(planned)
            return sum(record.num_bytes for record in save.files.values())

        what = f"restore step {step}"
        try:
            total = self._ranks.together(plan, what)
            with progress_bar(f"restoring step {step}", total, is_shown=progress) as advance:
                self._ranks.together(lambda: made[0].carry_out(advance), what)
        finally:
            for planned in made:  # where another rank failed, it holds tensors still
                planned.drop()

    def steps(self) -> list[int]:
        """Returns the steps of the published saves, ascending."""
        return self._directory.steps()

    def wait(self) -> None:
        """Blocks until no save is on its way, and old ones that are not kept are gone.

        Raises:
            CheckpointError, OSError: A save failed, and nobody was told yet.
        """
        self._drain()
        self._raise_failure()

    def close(self) -> None:
        """Waits for saves on their way, then gives memory and directory back; again, does nothing.

        Raises:
            CheckpointError, OSError: A save failed, and nobody was told yet.
        """
        if self._is_closed or os.getpid() != self._process:
            return
        self._drain()
        self._is_closed = True
        if self._writer is not None:
            self._writer.shutdown()
        self._arenas, self._free_arenas = [], []
        self._directory.unlock()
        _device.release_pinned_cache()
        self._raise_failure()

    def _begin(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: dict[str, float],
        rng: bool,
        token: str,
        begun: float,
    ) -> Job | None:
        """Takes the bytes and hands them to the writer; returns None for a save that is skipped."""
        self._use_directory()
        arena = self._free_arena()
        if arena is None:
            return None
        captured: Capture | None = None
        try:
            captured = self._capture(state, rng, arena)
            save = Save(step, self._directory.path / step_name(step))
            job = Job(save, captured, arena, metrics, token)
            if self._ranks.rank == 0:
                self._directory.check_writable(job.num_bytes)
            job.begun = time.perf_counter()
            pinned_bytes = sum(each.slab_bytes for each in self._arenas if each.is_pinned)
            save._figures = job.figures(job.begun - begun, pinned_bytes)
            if self._writer is None:
                self._writer = ThreadPoolExecutor(1, thread_name_prefix="residency-save")
            job.future = self._writer.submit(self._write, job)
        except BaseException:
            if captured is not None:
                captured.release()
            self._free_arenas.append(arena)
            raise
        self._on_their_way.append(job)
        return job

    def _capture(self, state: Mapping[str, Any], rng: bool, arena: SlabArena) -> Capture:
        check_is_finite(state)
        if self._spare_bytes is not None:
            for optimizer in optimizers_in(state):
                self._set_spare(optimizer)
        return capture(
            self._with_rng(state, rng),
            arena=arena,
            verify=self._is_verified,
            rank=self._ranks.rank_to_write,
        )

    def _write(self, job: Job) -> None:
        """Writes and publishes one save; runs on the writer's thread."""
        save = job.save
        try:
            self._directory.save(
                job.request(self._ranks), on_bytes=job.count, timeout_seconds=self._timeout_seconds
            )
        except BaseException as error:
            save._error = error
            unreported.append(save)
            let_locals_go(error)
        finally:
            job.captured.release()
            seconds = time.perf_counter() - job.begun
            save._figures = replace(save._figures, write_seconds=seconds)
            save._done.set()
        if save._error is None:
            self._retire(save.step)

    def _retire(self, step: int) -> None:
        """Removes what the retention does not keep. The save counts already, and nobody waits for
        the disk to let go of an old one, but for ``wait`` and ``close``.
        """
        if self._ranks.rank != 0 or self._retention is None:
            return
        try:
            self._directory.apply(self._retention, spare=step)
        except (OSError, ResidencyError) as error:  # old ones go another time
            _logger.warning("an old save in %s could not be removed: %s", self._directory, error)

    def _free_arena(self) -> SlabArena | None:
        """Returns host memory for a save, waiting where the policy says so; None to skip it."""
        self._reap()
        if self._free_arenas:
            return self._free_arenas.pop()
        if self._policy == "skip":
            return None
        if self._policy == "replace":
            newest = self._on_their_way[-1]
            if newest.future.cancel():
                self._on_their_way.pop()
                newest.captured.release()
                newest.save.is_skipped = True
                newest.save._done.set()
                return newest.arena
        self._on_their_way[0].save._done.wait()
        self._reap()
        return self._free_arenas.pop()

    def _reap(self) -> None:
        for job in [job for job in self._on_their_way if job.save.is_done()]:
            self._on_their_way.remove(job)
            self._free_arenas.append(job.arena)

    def _drain(self) -> None:
        for job in self._on_their_way:
            job.save._done.wait()
        if self._writer is not None:
            self._writer.submit(bool).result()  # what was begun before it has ended
        self._reap()

    def _raise_failure(self) -> None:
        """Raises the first failure of a save of this checkpointer that nobody was told of."""
        mine = [save for save in unreported if save.path.parent == self._directory.path]
        if not mine:
            return
        for save in mine:
            unreported.remove(save)
        error = mine[0]._error
        assert error is not None
        for save in mine[1:]:
            error.add_note(f"The save of step {save.step} failed, too: {save._error}")
        raise error

    def _use_directory(self) -> None:
        if self._ranks.rank == 0 and not self._directory.is_locked:
            self._drain()  # the directory was removed: a save on its way still holds the old lock
            self._directory.unlock()
            self._directory.lock()
            self._directory.clean_up()

    def _set_spare(self, optimizer: Any) -> None:
        owner = owner_of(optimizer)
        if owner is not None:
            owner.set_spare(optimizer, self._spare_bytes)

    def _with_rng(self, state: Any, rng: bool) -> Any:
        if not rng:
            return state
        return {**state, RNG: _rng.capture()}

    def _check_open(self) -> None:
        if self._is_closed:
            raise RefusedError(
                f"this checkpointer of {str(self._directory.path)!r} is closed; make another one."
            )
        if os.getpid() != self._process:
            raise RefusedError(
                f"this checkpointer of {str(self._directory.path)!r} belongs to process "
                f"{self._process}, from which this one was forked; expected calls there. Nothing "
                "was done."
            )
