"""The ranks of a run: which one this process is, and which of them failed.

torch's part for ranks may be missing, and is imported only when it is asked.
"""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


def has_ranks() -> bool:
    """Returns whether this process has joined others."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def rank_and_world_size() -> tuple[int, int]:
    """Returns the rank of this process and how many there are."""
    import torch.distributed as dist

    return (dist.get_rank(), dist.get_world_size()) if has_ranks() else (0, 1)


def all_ranks() -> object:
    """Returns the group of all ranks, or None where there is one rank."""
    import torch.distributed as dist

    return dist.group.WORLD if rank_and_world_size()[1] > 1 else None


def failures_of_ranks(failure: T | None, *, group: Any = None) -> dict[int, T]:
    """Returns what each rank that failed says of its failure.

    All ranks of the group call this, and none returns before all have.

    Args:
        failure: What this rank says, for ``pickle``; None where it did not fail.
        group: A process group; None is that of all ranks.
    """
    import torch.distributed as dist

    failures: list[T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(failures, failure, group=group)
    return {rank: each for rank, each in enumerate(failures) if each is not None}
