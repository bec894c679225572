"""What a save takes on a device: extra bytes, waits of the host, and longer steps.

On the simulated accelerator the seconds are those of its clock. On a real one they are this
machine's, and the state is of 16 GiB; of the peers, DCP with its own pinned stager is measured.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import residency
from benchmarks.checkpoint.saves import Begin, dcp_async, residency_save
from benchmarks.checkpoint.state import State, make_state, put_pattern
from residency._units import format_bytes, parse_bytes

_NUM_STEPS = 8
# Source: NVIDIA's data sheet of the H100 SXM. The rates of the link are `Clock`'s own.
_MEMORY_BYTES_PER_SECOND = 3_350_000_000_000


def simulated_lines() -> list[str]:
    """Saves from the simulated accelerator."""
    clock = residency.sim.Clock(memory_bytes_per_second=_MEMORY_BYTES_PER_SECOND)
    device = residency.sim.enable("1GiB", clock=clock)
    state = make_state(parse_bytes("192MiB"), device)
    put_pattern(state.flat())
    step = _make_step(state)
    with tempfile.TemporaryDirectory() as folder, residency.Checkpointer(folder) as saver:
        saver.prepare(state.named())
        step()
        torch.accelerator.synchronize()
        plain = _simulated_seconds(step)
        allocated = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        waited = residency.sim.now_seconds()
        save = saver.save(1, state.named())
        waited = residency.sim.now_seconds() - waited
        extra = torch.accelerator.max_memory_allocated() - allocated
        beside = _simulated_seconds(step)
        save.wait()
    return [
        f"SIMULATED ACCELERATOR, {format_bytes(state.num_bytes)} on the device, its own clock",
        f"extra device memory of a save       {format_bytes(extra)}",
        f"the host waited in the call         {waited * 1e3:.3f} ms",
        f"optimizer step alone                {plain * 1e3:.3f} ms",
        f"the step right after the save       {beside * 1e3:.3f} ms (waits for the copies, on the "
        "device)",
    ]


def _simulated_seconds(step: Callable[[], None]) -> float:
    start = residency.sim.now_seconds()
    step()
    torch.accelerator.synchronize()
    return residency.sim.now_seconds() - start


def real_lines(size: str = "16GiB") -> list[str]:
    """Saves from a real accelerator; the state is made of bytes that are there."""
    device = torch.accelerator.current_accelerator(check_available=True)
    assert device is not None
    state = make_state(parse_bytes(size), device)
    put_pattern(state.flat())
    step = _make_step(state)
    lines = [f"{device.type.upper()}, {format_bytes(state.num_bytes)} on the device"]
    for name, saver in (
        ("residency", lambda: residency_save(state)),
        ("dcp.async thread, stager", lambda: dcp_async(state, process=False, stager=True)),
    ):
        with tempfile.TemporaryDirectory() as folder, saver() as begin:
            lines += [f"{name:28}{line}" for line in _measure(begin, step, Path(folder))]
    return lines


def _measure(begin: Begin, step: Callable[[], None], folder: Path) -> list[str]:
    for _ in range(2):
        step()
    plain = statistics.median(_seconds(step) for _ in range(_NUM_STEPS))
    lines = []
    for index in range(3):
        torch.accelerator.synchronize()
        allocated = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        start = time.perf_counter()
        save = begin(folder / f"save-{index + 1}")
        call = time.perf_counter() - start
        save.staged()
        staged = time.perf_counter() - start
        extra = torch.accelerator.max_memory_allocated() - allocated
        beside = []
        while not save.is_done():
            beside.append(_seconds(step))
        save.done()
        slowdown = f"{statistics.mean(beside) / plain:.2f} x" if beside else "-"
        lines.append(
            f"save {index + 1}: call {call * 1e3:8.1f} ms, may go on {staged * 1e3:8.1f} ms, wall "
            f"{time.perf_counter() - start:6.2f} s, extra device memory {format_bytes(extra)}, "
            f"steps {slowdown}"
        )
    return lines


def _seconds(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    torch.accelerator.synchronize()
    return time.perf_counter() - start


def _make_step(state: State) -> Callable[[], None]:
    for parameter in state.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return state.optimizer.step  # type: ignore[return-value]
