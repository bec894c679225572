"""How the ranks of a process group agree that all of them did their part of a hand-off.

What each did is gathered by all, so that every rank knows who failed; no rank goes on before all
have come this far. A rank that does not come is noticed by the timeout.

``failures_of_ranks`` does not do here: a rank of a hand-off may be gone, so there is a timeout, and
an agreement that was given up must not be completed later.

[Note: a late rank] A collective that a rank gave up is still there, and a rank that comes late
would complete it, alone. Each agreement therefore has a second round, which a rank that gave up
does not join, and its group is not used again.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from residency._errors import HandOffError, InvalidArgumentError
from residency._registries import WeakRegistry
from residency._units import format_bytes

FAILED = -1  # instead of the bytes that are missing
_PAUSE_SECONDS = 0.001  # a look is cheap; any few milliseconds work
# Groups, which end with their last user: one that is there as the interpreter ends would wait for
# a thread of its backend, which waits for the interpreter (gloo, torch 2.13).
_given_up: WeakRegistry[Any] = WeakRegistry()


def check_group(group: object) -> Any:
    """Returns a process group that this process is a rank of, or None.

    Raises:
        InvalidArgumentError: The group is not one, or this process is none of its ranks.
    """
    if group is None:
        return None
    if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
        raise InvalidArgumentError(
            f"group is {group!r}; expected a process group that this process is a rank of."
        )
    return group


def agree(group: Any, device: torch.device, missing: int, *, seconds: float) -> None:
    """Says to all ranks how many bytes are missing here, and hears the same of them.

    Args:
        group: A process group; collectives are made in it.
        device: Where they are made if the group has no backend for the host.
        missing: Bytes that this rank could not free; 0 where all went well, and `FAILED` where
            something else went wrong.
        seconds: How long to wait for the others.

    Raises:
        HandOffError: Another rank is short of bytes, or did not come in time.
    """
    if group in _given_up:
        raise HandOffError(
            "Ranks of this group did not come to an earlier hand-off in time, so that they are not "
            "in step. Make a new group."
        )
    figures = _gather(group, device, missing, seconds)
    own = dist.get_rank(group)
    short = {rank: figure for rank, figure in enumerate(figures) if figure and rank != own}
    if short and not missing:
        ranks = ", ".join(
            f"rank {rank} {'failed' if n == FAILED else 'lacks ' + format_bytes(n)}"
            for rank, n in short.items()
        )
        raise HandOffError(
            f"Other ranks of the group could not do their part: {ranks}. Mend the causes that "
            "their own errors name, then call hand_off again on all ranks."
        )
    if not any(figures):
        _gather(group, device, 0, seconds)  # [Note: a late rank]


def _gather(group: Any, device: torch.device, figure: int, seconds: float) -> list[int]:
    host = torch.device("cpu")
    # A group says in no other way whether it has a backend for the host.
    meeting = host if host in group._device_types else device
    mine = torch.tensor([figure], dtype=torch.int64, device=meeting)
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    try:
        work: Any = dist.all_gather(all_of_them, mine, group=group, async_op=True)
        end = time.monotonic() + seconds
        while not work.is_completed():  # whose own wait might outlast any timeout
            if time.monotonic() > end:
                _given_up.add(group)
                raise HandOffError(
                    f"Not all ranks of the group came within {seconds:g} s; raise timeout= if "
                    "they are slow."
                )
            time.sleep(_PAUSE_SECONDS)
        work.wait()
    except RuntimeError as error:  # of the backend: a closed connection
        if isinstance(error, HandOffError | torch.AcceleratorError):
            raise
        _given_up.add(group)
        first_line = str(error).partition("\n")[0]
        raise HandOffError(
            f"A rank of the group is gone: {first_line}. End all ranks and start again."
        ) from error
    return [int(tensor.item()) for tensor in all_of_them]
