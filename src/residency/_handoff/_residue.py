"""What a process keeps on a device beyond the tensors that its torch can name.

Each part is measured where something tells it, and named without a figure where nothing does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from residency import _device, _private_pools
from residency._memory import MemoryState
from residency._units import format_bytes

_DEVICE_BACKENDS = ("nccl", "rccl", "xccl", "hccl")


def residue_lines(device: torch.device, state: MemoryState) -> Iterator[str]:
    """Yields a line for each part of a device's memory that no tensor accounts for.

    Args:
        device: The accelerator.
        state: Its memory, as it was just measured.
    """
    pools = _private_pools.reserved_bytes(device, _device.allocator_figures(device))
    if pools:
        yield _line(pools, "reserved by private pools: graphs that were captured, a MemPool")
    count = _num_communicators()
    groups = f", {count} communicators of process groups" if count else ""
    charged = _device.charged_bytes(device)
    if charged is not None:
        yield _line(
            max(0, charged - state.reserved),
            f"charged to this process beyond torch's allocator: its context{groups}",
        )
        others = max(0, state.outside - (charged - state.reserved))
        yield _line(others, "charged to other processes")
    elif state.outside:
        yield _line(
            state.outside,
            f"outside: other processes, and this one's context{groups}; "
            "install nvidia-ml-py to see each of them",
        )


def _line(num_bytes: int, text: str) -> str:
    return f"  {format_bytes(num_bytes):>12}  {text}"


def _num_communicators() -> int:
    """Returns how many process groups of the process have memory on the device."""
    module: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if module is None:
        return 0
    backends = [str(backend) for backend, _ in module._world.pg_map.values()]
    return sum(any(name in backend for name in _DEVICE_BACKENDS) for backend in backends)
