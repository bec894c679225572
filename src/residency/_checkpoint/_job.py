"""One save, with what it takes until it is written, and this process's place among the ranks."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeVar, cast

import torch.distributed as dist

from residency import _device
from residency._checkpoint._capture._capture import Capture
from residency._checkpoint._disk._publish import CheckpointDirectory, SaveRequest
from residency._checkpoint._disk._system import system_in_use
from residency._checkpoint._document._notes import TensorNote, read_note
from residency._checkpoint._files import plan_files
from residency._checkpoint._save import (
    PUBLISHED,
    SKIPPED,
    Save,
    SaveOutcome,
    SaveStatistics,
    failed,
    let_locals_go,
    unreported,
)
from residency._checkpoint._sources._own import check_whole
from residency._errors import CheckpointError, CorruptSaveError
from residency._ranks import absent_ranks, failures_of_ranks, rank_and_world_size
from residency._transfer import SlabArena

T = TypeVar("T")

_logger = logging.getLogger("residency")


class Job:
    """One save, and the owner of all that it takes, from the first loan to its publication.

    [Note: whose a job is] The caller's until ``is_handed`` is set, which is one statement; the
    writer's thread's from then on. What ends a job asks that alone, so that an interrupt at
    whatever line finds one owner. ``finish`` ends it, on whichever thread: the memory comes back
    first, and nothing that goes wrong there keeps a thread waiting that waits for the save. It says
    "published" of what ``write`` has seen published, and of what has no outcome that it failed.

    Attributes:
        save: What the caller has of it.
        captured: The bytes.
        metrics: Figures of the step.
        number: Its place in the order of the calls.
        begun: When the call was over.
        num_bytes: What is stored, without headers.
        is_handed: Whether the writer's thread has it. [Note: whose a job is]
        is_begun: Whether it is being written, or was.
        is_lost: Whether a broken device may still copy into its memory.
        claim: Held by who decides that it is written, or that another takes its place.
    """

    def __init__(
        self, save: Save, arena: SlabArena, metrics: Mapping[str, float], number: int
    ) -> None:
        self.save = save
        self.captured = Capture(arena)
        self.metrics = metrics
        self.number = number
        self.begun = 0.0
        self.num_bytes = 0
        self._names: list[str] = []
        self.is_handed = False
        self.is_begun = False
        self.is_lost = False
        self.claim = threading.Lock()
        self._outcome: SaveOutcome | None = None

    def describe(self, state: object, *, rank: int | None) -> None:
        """Finds what is to be saved, and borrows what optimizers lend."""
        self.captured.describe(state, rank=rank)
        blocks = self.captured.blocks.blocks
        self.num_bytes = sum(block.record.num_bytes for block in blocks)
        self._names = list(self.captured.description.leaves)
        self.save._num_bytes = self.num_bytes

    def copy(self) -> None:
        """Takes the bytes, into room that was made; what the caller drops from now on is free."""
        self.captured.copy()
        self.captured.description.leaves.clear()

    def begin(self) -> bool:
        """Returns whether the job is still to be written; no other takes its place then."""
        with self.claim:
            if self._outcome is not None:
                self.finish()  # an interrupt may have come in the way
            if self.is_begun or self.save.is_done():
                return False
            self.is_begun = True
        return True

    def write(
        self,
        directory: CheckpointDirectory,
        ranks: Ranks,
        timeout_seconds: float,
        is_repeated: Callable[[], bool],
    ) -> None:
        """Writes and publishes the save, or notes why that failed; raises nothing."""
        try:
            _device.use_index(self.captured.device_index)  # a thread begins on the first device
            directory.save(
                # Kept by no frame of this thread once it is written: who waits is woken below.
                replace(self.request(ranks), is_repeated=is_repeated),
                on_total=self.expect,
                on_bytes=self.count,
                timeout_seconds=timeout_seconds,
            )
        except BaseException as error:
            self._outcome = failed(error)
            unreported.append(self.save)
            let_locals_go(error)
        else:
            self._outcome = PUBLISHED
        finally:
            try:
                self.finish()
            finally:
                self._tell()

    def finish(self) -> None:
        """Gives everything back and lets those go on who wait; raises nothing of its own, and after
        an interrupt it may be called again.
        """
        try:
            self.is_lost = not self.captured.release() or self.is_lost
        except Exception:
            self.is_lost = True
            _logger.exception("memory of the save of step %d is left alone", self.save.step)
        if self.is_begun and not self.save.is_done():
            seconds = time.perf_counter() - self.begun
            self.save._figures = replace(self.save._figures, write_seconds=seconds)
        self._tell()

    def _tell(self) -> None:
        """Sets the save's outcome; what has none was given up."""
        if self._outcome is None:
            error = CheckpointError(
                f"the call that began the save of step {self.save.step} did not come to its end. "
                "It was not written; the saves before are as they were."
            )
            self._outcome = failed(error)
        self.save._outcome.set(self._outcome)

    def skip(self) -> None:
        """Ends the job as one that is not carried out."""
        self._outcome = SKIPPED
        self.finish()

    def expect(self, num_bytes: int) -> None:
        """Notes the size of the files, headers included."""
        self.save._num_bytes = num_bytes

    def count(self, num_bytes: int) -> None:
        self.save._written_bytes += num_bytes

    def figures(self, call_seconds: float, pinned_bytes: int) -> SaveStatistics:
        """Returns the figures of a save that is about to be written."""
        copied = {True: 0, False: 0}
        lent_bytes = 0
        for held in self.captured.held:
            if held.block.lent is not None:
                lent_bytes += held.block.num_bytes
            else:
                copied[held.group.flight is not None] += held.block.num_bytes
        return SaveStatistics(
            call_seconds=call_seconds,
            copied_from_device_bytes=copied[True],
            copied_from_host_bytes=copied[False],
            lent_bytes=lent_bytes,
            pinned_bytes=pinned_bytes,
            written_bytes=0,
            write_seconds=None,
        )

    def request(self, ranks: Ranks) -> SaveRequest:
        """Returns what this rank is to write.

        Raises:
            CheckpointError: The document would name a tensor that is nowhere.
        """
        self._check_is_whole()
        return replace(
            ranks.request(self.save.step, self.number),
            files=plan_files(
                self.captured.description.tree,
                self.captured.held,
                rank=ranks.rank,
                world_size=ranks.world_size,
            ),
            document=self.captured.document,
            metrics=self.metrics,
            check_whole=check_whole,
        )

    def _check_is_whole(self) -> None:
        stored = {held.block.record.name for held in self.captured.held}
        notes = self.captured.blocks.special
        for name in self._names:
            if name in stored:
                continue
            note = read_note(name, notes[name]) if name in notes else TensorNote()
            is_elsewhere = note.of_rank is not None or note.is_empty_shard
            if note.of not in stored and not is_elsewhere:
                raise CheckpointError(
                    f"the save of step {self.save.step} lists {name!r} but holds no data for it. "
                    "It was not written; earlier saves are unchanged."
                )


class Ranks:
    """This process's place among the ranks, and a token that all of them have, once each."""

    def __init__(self, timeout_seconds: float) -> None:
        self.rank, self.world_size = rank_and_world_size()
        self._timeout_seconds = timeout_seconds
        self.meet("make a Checkpointer")
        self.token = self.of_first(partial(secrets.token_hex, 4))

    def meet(self, what: str) -> None:
        """Waits until all ranks are about to do something: a collective would wait for a rank that
        never comes as long as the process group does.

        Args:
            what: What they do, for the message.

        Raises:
            CheckpointError: Ranks did not come in time, or are gone.
        """
        if self.world_size == 1 or system_in_use().is_alone:
            return
        try:
            absent = absent_ranks(what, seconds=self._timeout_seconds)
        except RuntimeError as error:
            first_line = str(error).partition("\n")[0]
            raise CheckpointError(
                f"the store of the ranks does not answer: {first_line}. Nothing was changed; end "
                "all ranks and start again."
            ) from error
        if absent:
            raise CheckpointError(
                f"of {self.world_size} ranks, {', '.join(map(str, absent))} did not come to {what} "
                f"within {self._timeout_seconds:g} s. Nothing was changed; do so on every rank, or "
                "raise timeout_seconds if they are slow."
            )

    def request(self, step: int, number: int) -> SaveRequest:
        """Returns this rank's share of a save, with nothing in it yet."""
        return SaveRequest(step, [], {}, {}, self.rank, self.world_size, self.token, number)

    @property
    def rank_to_write(self) -> int | None:
        """The rank for ``capture``; None when it is the only one."""
        return self.rank if self.world_size > 1 else None

    def of_first(self, value: Callable[[], T]) -> T:
        """Returns what rank 0 says."""
        if self.world_size == 1:
            return value()
        values = [value() if self.rank == 0 else None]
        dist.broadcast_object_list(values, src=0)
        return cast(T, values[0])

    def together(self, action: Callable[[], T], what: str) -> T:
        """Does something on all ranks, which fails on all when it fails on one.

        Args:
            action: What each rank does.
            what: What it is, for the message.

        Raises:
            CorruptSaveError: A rank found damage, and none failed otherwise.
            CheckpointError: Another rank failed, which did not find damage.
        """
        if self.world_size == 1:
            return action()
        failure: Exception | None = None
        results = []
        try:
            results.append(action())
        except Exception as error:
            failure = error
        mine = None
        if failure is not None:
            where = {key: getattr(failure, key, None) for key in ("file", "tensor", "offset")}
            mine = str(failure) or repr(failure), isinstance(failure, CorruptSaveError), where
        failed = failures_of_ranks(mine)
        if not failed:
            return results[0]
        # All ranks decide alike: damage lets them try another save, what else fails does not.
        worst = next((rank for rank, (_, is_damage, _) in failed.items() if not is_damage), None)
        if failure is not None and (worst is None or not isinstance(failure, CorruptSaveError)):
            try:
                raise failure
            finally:
                failure = None  # an error that this frame keeps would keep the frame
        rank = min(failed) if worst is None else worst
        message = f"rank {rank} could not {what}: {failed[rank][0]}"
        if worst is None:
            raise CorruptSaveError(message, **failed[rank][2])
        raise CheckpointError(message)
