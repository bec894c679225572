"""How the ranks of a process group agree that all of them did their part of a hand-off.

What each did is gathered by all, so that every rank knows who failed; nobody goes on before all
have come this far. A rank that does not come is noticed by the timeout.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch

from residency import _device
from residency._errors import HandOffError
from residency._units import format_bytes

FAILED = -1  # instead of the bytes that are missing
_PAUSE_SECONDS = 0.001


def agree(group: Any, missing: int, *, seconds: float) -> None:
    """Says to all ranks how many bytes are missing here, and hears the same of them.

    Args:
        group: A process group; a collective is made in it.
        missing: Bytes that this rank could not free or bring back; 0 where all went well, and
            `FAILED` where something else went wrong.
        seconds: How long to wait for the others.

    Raises:
        HandOffError: Another rank is short of bytes, or did not come in time.
    """
    figures = _gather(group, missing, seconds)
    import torch.distributed as dist

    own = dist.get_rank(group)
    short = {rank: figure for rank, figure in enumerate(figures) if figure and rank != own}
    if short and not missing:
        ranks = ", ".join(
            f"rank {rank} {'failed' if n == FAILED else 'lacks ' + format_bytes(n)}"
            for rank, n in short.items()
        )
        raise HandOffError(f"Other ranks of the group could not do their part: {ranks}.")


def _gather(group: Any, figure: int, seconds: float) -> list[int]:
    import torch.distributed as dist

    device = _device_of(group)
    mine = torch.tensor([figure], dtype=torch.int64, device=device)
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    try:
        work = dist.all_gather(all_of_them, mine, group=group, async_op=True)
        if device.type == "cpu":
            work.wait(timedelta(seconds=seconds))
        else:
            _wait_on_device(work, device, seconds)
    except RuntimeError as error:  # of the backend: a timeout, a closed connection
        first_line = str(error).partition("\n")[0]
        raise HandOffError(
            f"Not all ranks of the group came to the hand-off within {seconds:g} s: {first_line}"
        ) from error
    return [int(tensor.item()) for tensor in all_of_them]


def _wait_on_device(work: Any, device: torch.device, seconds: float) -> None:
    """Waits on the host for a collective whose own wait only orders streams."""
    end = time.monotonic() + seconds
    work.wait()
    done = _device.new_event(device)
    done.record(_device.current_stream(device))
    while not done.query():
        if time.monotonic() > end:
            raise HandOffError(f"Not all ranks of the group came within {seconds:g} s.")
        time.sleep(_PAUSE_SECONDS)


def _device_of(group: Any) -> torch.device:
    """Returns where a tensor has to be for a collective of the group: the host, if it may."""
    import torch.distributed as dist

    whole: Any = dist.group.WORLD
    kinds = (whole if group is None else group)._device_types
    host = torch.device("cpu")
    return host if host in kinds else _device.accelerator() or host
