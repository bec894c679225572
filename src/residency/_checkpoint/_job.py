"""One save with what it takes until it is written, and this process's place among the ranks."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from concurrent.futures import Future

import torch.distributed as dist

from residency._checkpoint._capture import Capture
from residency._checkpoint._disk._manifest import file_name
from residency._checkpoint._disk._parts import FilePlan, Part
from residency._checkpoint._save import Save
from residency._transfer import SlabArena


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

    def count(self, num_bytes: int) -> None:
        self.save._written_bytes += num_bytes

    def files(self, rank: int, world_size: int) -> list[FilePlan]:
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

    @property
    def rank_to_write(self) -> int | None:
        """Returns the rank for ``capture``; None when it is the only one."""
        return self.rank if self.world_size > 1 else None
