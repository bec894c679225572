"""The ranks of a run: which one this process is, which of them come, and which of them failed.

torch's part for ranks may be missing: then it says that it is not available.
"""

from __future__ import annotations

import os
import time
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")

_FIRST_PAUSE_SECONDS = 0.001  # ranks in step find each other within milliseconds
_LAST_PAUSE_SECONDS = 0.1  # the store of a thousand ranks takes 10,000 short questions a second


def has_ranks() -> bool:
    """Returns whether this process has joined others."""
    return dist.is_available() and dist.is_initialized()


def rank_and_world_size() -> tuple[int, int]:
    """Returns the rank of this process and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if has_ranks() else (0, 1)


def all_ranks() -> object:
    """Returns the group of all ranks, or None where there is one rank."""
    return dist.group.WORLD if rank_and_world_size()[1] > 1 else None


def failures_of_ranks(failure: T | None, *, group: Any = None) -> dict[int, T]:
    """Returns what each rank that failed says of its failure.

    All ranks of the group call this, and none returns before all have.

    Args:
        failure: What this rank says, for ``pickle``; None where it did not fail.
        group: A process group; None is that of all ranks.
    """
    failures: list[T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(failures, failure, group=group)
    return {rank: each for rank, each in enumerate(failures) if each is not None}


def absent_ranks(place: str, *, seconds: float) -> list[int]:
    """Waits until all ranks have come to a place of the program; returns those that did not.

    No collective is begun, which could not be given up: ranks leave word in the store by which they
    found each other. A meeting ends once, by the last rank that comes or the first that gives up;
    who comes later finds it given up, and waits for the next.

    Args:
        place: Its name; each rank comes to it as often as the others.
        seconds: How long to wait for them.

    Returns:
        None of them where all have come, or where no other can (torch's ``fake`` backend).

    Raises:
        RuntimeError: The store does not answer, as after the end of the process that has it.
    """
    rank, world_size = rank_and_world_size()
    # no public name (torch 2.13); torch's own checks of who has come ask it
    store: Any = dist.distributed_c10d._get_default_store() if world_size > 1 else None
    if store is None or dist.get_backend() == "fake":  # MPI has no store
        return []
    end = time.monotonic() + seconds
    # torchrun keeps its store when it starts the ranks anew, and the counts of the life before are
    # not alike: one rank waited here, another had not come yet.
    name = f"residency/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{place}"
    while True:
        number = store.add(f"{name}/of-{rank}", 1)
        meeting = _Meeting(store, f"{name}/{number}")
        if meeting.is_over():  # given up, before this rank came
            continue
        if meeting.is_of_all(world_size, end):
            return []
        others = (each for each in range(world_size) if each != rank)
        absent = [n for n in others if store.add(f"{name}/of-{n}", 0) < number]
        if absent:
            return absent


class _Meeting:
    """One meeting of all ranks in the store."""

    def __init__(self, store: Any, name: str) -> None:
        self._store = store
        self._name = name

    def is_over(self) -> bool:
        """Returns whether all have come, or one has given up."""
        return bool(self._store.check([f"{self._name}/end"]))

    def is_of_all(self, world_size: int, end: float) -> bool:
        """Waits until it is over, and gives it up at a time of the clock; returns whether all
        have come.
        """
        if self._store.add(f"{self._name}/here", 1) == world_size:
            self._end("all")
        pause = _FIRST_PAUSE_SECONDS
        while not self.is_over():
            if time.monotonic() >= end:
                self._end("given up")
            time.sleep(pause)  # the others are on their way
            pause = min(2 * pause, _LAST_PAUSE_SECONDS)
        return bool(self._store.get(f"{self._name}/end") == b"all")

    def _end(self, word: str) -> None:
        if self._store.add(f"{self._name}/ends", 1) == 1:  # of several that would, one does
            self._store.set(f"{self._name}/end", word)
