"""One save with what it takes until it is written, and this process's place among the ranks."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch.distributed as dist

from residency._checkpoint._capture import Capture
from residency._checkpoint._disk._manifest import file_name
from residency._checkpoint._disk._parts import FilePlan, Part
from residency._checkpoint._disk._publish import SaveRequest
from residency._checkpoint._save import Save, SaveStatistics
from residency._errors import CheckpointError, CorruptSaveError
from residency._transfer import SlabArena

T = TypeVar("T")


class Job:
    """Is one save with what it takes until it is written."""

    def __init__(
        self,
        save: Save,
        captured: Capture,
        arena: SlabArena,
        metrics: Mapping[str, float],
        token: str,
    ) -> None:
        self.save = save
        self.captured = captured
        self.arena = arena
        self.metrics = metrics
        self.token = token
        self.begun = 0.0
        self.future: Future[None]
        self.num_bytes = sum(held.block.record.num_bytes for held in captured.held)
        captured.description.leaves.clear()  # what the caller drops during a save is free

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
                copied[held.group.event is not None] += held.block.num_bytes
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
        """Returns what this rank is to write."""
        return replace(
            ranks.request(self.save.step, self.token),
            files=self._files(ranks.rank, ranks.world_size),
            document=self.captured.document,
            metrics=self.metrics,
        )

    def _files(self, rank: int, world_size: int) -> list[FilePlan]:
        """Returns a file for each top-level name of the state that has tensors."""
        parts: dict[str, list[Part]] = {}
        names = sorted(self.captured.description.tree, key=len, reverse=True)
        for held in self.captured.held:
            record = held.block.record
            top = next(t for t in names if f"{record.name}.".startswith(f"{t}."))
            parts.setdefault(top, []).append(Part(record, held.stored, held.release))
        used: dict[str, str] = {}
        for top in parts:
            plain = re.sub(r"[^A-Za-z0-9_-]+", "_", top).lstrip("-") or "state"
            while plain in used.values():
                plain += "_"
            used[top] = plain
        return [
            FilePlan(file_name(used[top], rank=rank, world_size=world_size), each)
            for top, each in parts.items()
        ]


class Ranks:
    """Is this process's place among the ranks of the job, and a name that all of them know."""

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 1
        self.token = secrets.token_hex(4)
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        if self.world_size > 1:
            tokens = [self.token]
            dist.broadcast_object_list(tokens, src=0)
            self.token = tokens[0]

    def token_of(self, number: int) -> str:
        """Returns the name of a save, by its place in the order; all ranks have the same."""
        return f"{self.token}-{number}"

    def request(self, step: int, token: str) -> SaveRequest:
        """Returns this rank's share of a save, with nothing in it yet."""
        return SaveRequest(step, [], {}, {}, self.rank, self.world_size, token)

    @property
    def rank_to_write(self) -> int | None:
        """Returns the rank for ``capture``; None when it is the only one."""
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
        try:
            result = action()
        except Exception as error:
            failure = error
        mine = None
        if failure is not None:
            where = {key: getattr(failure, key, None) for key in ("file", "tensor", "offset")}
            mine = str(failure) or repr(failure), isinstance(failure, CorruptSaveError), where
        failures: list[Any] = [None] * self.world_size
        dist.all_gather_object(failures, mine)
        failed = {rank: each for rank, each in enumerate(failures) if each is not None}
        if not failed:
            return result
        # All ranks decide alike: damage lets them try another save, what else fails does not.
        worst = next((rank for rank, (_, is_damage, _) in failed.items() if not is_damage), None)
        if failure is not None and (worst is None or not isinstance(failure, CorruptSaveError)):
            raise failure
        rank = min(failed) if worst is None else worst
        message = f"rank {rank} could not {what}: {failed[rank][0]}"
        if worst is None:
            raise CorruptSaveError(message, **failed[rank][2])
        raise CheckpointError(message)
