"""The ranks of a run, for parts that have to agree. Imports torch only when it is asked."""

from __future__ import annotations


def all_ranks() -> object:
    """Returns the group of all ranks, or None where there is one rank."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.group.WORLD
