"""The device under a case: which one, how many bytes it may use, whether it is empty again.

Takes the accelerator of this machine when there is one, else the simulated one. Undoes its limit
and the process-wide settings that it changed when it is closed.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from residency import _device, holders, sim
from residency._demo._progress import Show
from residency._errors import RefusedError
from residency._units import format_bytes, parse_bytes

Face = Literal["sim", "cuda"]
_WORKSPACES = "CUBLAS_WORKSPACE_CONFIG"
_SIMULATOR = "the simulated accelerator"
_SIMULATED_CAPACITY_BYTES = parse_bytes("8GiB")
_MOST_LEFT_BYTES = parse_bytes("1MiB")  # of what ran before


def _enable(capacity_bytes: int, face: Face) -> torch.device:
    # Without workspaces: deterministic cuBLAS takes 32 MiB a thread (see open_bench), more than the
    # whole state of the small models here, on which the cases base their capacities. Nor with a
    # context, which takes more still.
    return sim.enable(capacity_bytes, workspaces=False, context="0B", device=face)


def real_device() -> torch.device | None:
    """Returns the accelerator of this machine; None where there is none but the simulated one."""
    return None if _device.is_simulated() else _device.accelerator()


class Bench:
    """The device that the runs of a case share, one after another.

    Attributes:
        device: The accelerator.
        is_simulated: Whether it is the simulated one.
    """

    def __init__(self, face: Face, show: Show) -> None:
        """Takes the accelerator of this machine, or enables the simulated one.

        Args:
            face: As which device it is to appear.
            show: Is called while the simulated one is compiled, at its first use on this machine.
        """
        self._face: Face = face
        found = real_device()
        self.is_simulated = found is None
        if found is None:
            sim.build(lambda what, done, num_steps: show(_SIMULATOR, what, done + 1, num_steps))
            found = _enable(_SIMULATED_CAPACITY_BYTES, face)
        self.device: torch.device = found
        self._empty_bytes = 0

    def describe(self) -> str:
        """Returns the device in words."""
        if self.is_simulated:
            where = " in CUDA's place" if self._face == "cuda" else ""
            return f"simulated accelerator{where} (this machine shows no other)"
        total_bytes = _device.memory_info()[1]
        return f"{self.device.type}, {format_bytes(total_bytes)}"

    def limit(self, capacity_bytes: int | None) -> None:
        """Sets the bytes that the following runs may use; None takes the limit away.

        Raises:
            RefusedError: The device cannot hold that much to begin with, or something of the run
                before is still there.
        """
        left = self.settle()
        if capacity_bytes is not None and left >= _MOST_LEFT_BYTES:
            held = "\n".join(f"  {format_bytes(h.num_bytes)}  {h.path}" for h in holders())
            raise RefusedError(
                f"{format_bytes(left)} of what ran before are still on the device, so that a limit "
                f"would mean little. Run this case alone, with --case. They are held by:\n{held}"
            )
        if self.is_simulated:
            _enable(capacity_bytes or _SIMULATED_CAPACITY_BYTES, self._face)
            return
        total_bytes = _device.memory_info()[1]
        if capacity_bytes is not None and capacity_bytes > total_bytes:
            raise RefusedError(
                f"The case needs a capacity of {format_bytes(capacity_bytes)}; the device has "
                f"{format_bytes(total_bytes)}. Run it on a larger device, or on a machine "
                "without one."
            )
        if not _device.limit_memory(capacity_bytes or total_bytes, self.device):
            raise RefusedError(
                f"The memory of a {self.device.type!r} device cannot be limited, and the case "
                "needs a limit. Run it on CUDA, or on a machine that shows no accelerator."
            )

    def settle(self) -> int:
        """Frees what the last run left, and returns the bytes that are still allocated beyond the
        start's.
        """
        _device.finish_backward(self.device)
        gc.collect()
        _device.synchronize()
        torch.accelerator.empty_cache()
        return _device.memory_allocated() - self._empty_bytes

    def mark_empty(self) -> None:
        """Takes the bytes allocated now as those of the device's libraries, which no run gives
        back.
        """
        self._empty_bytes += self.settle()


@contextmanager
def open_bench(face: Face, show: Show) -> Iterator[Bench]:
    """Opens the bench under deterministic algorithms; ends them, and any limit, on the way out."""
    # cuBLAS reads this when its first handle is made; without it deterministic algorithms refuse.
    configured = os.environ.get(_WORKSPACES)
    os.environ.setdefault(_WORKSPACES, ":4096:8")
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    bench = Bench(face, show)
    torch.use_deterministic_algorithms(True)
    try:
        yield bench
    finally:
        if configured is None:
            os.environ.pop(_WORKSPACES, None)  # or every later child would take larger workspaces
        torch.use_deterministic_algorithms(was_deterministic)
        bench.limit(None)
