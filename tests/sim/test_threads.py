"""Threads and kernels written in Python: nobody waits for a lock that is never let go.

A deadlock would hang the test run, so each script runs in a process of its own, with a limit.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from residency import sim

pytestmark = pytest.mark.sim

_LIMIT_SECONDS = 240

# A CPU kernel written in Python, as the device's own kernels may be: it lets other threads have the
# interpreter's lock in its midst, and they free device tensors, ask and wait.
_KERNEL = """
import threading, time
import torch
from residency import sim

device = sim.enable("1GiB", schedule={schedule!r}, check_races={check_races}, clock=sim.Clock())
inside, freed = threading.Event(), threading.Event()

@torch.library.custom_op("test::slow_double", mutates_args=("out",), device_types="cpu")
def slow_double(x: torch.Tensor, out: torch.Tensor) -> None:
    inside.set()
    assert freed.wait(60), "the other thread did not come through"
    out.copy_(x * 2)

side = torch.Stream(device)  # from here on kernels are queued
x = torch.ones(1000, device=device)
out = torch.zeros(1000, device=device)
torch.accelerator.synchronize()
others = [torch.ones(1000, device=device) for _ in range(100)]
"""

_FREE_MEANWHILE = (
    _KERNEL
    + """
def free():
    assert inside.wait(60)
    others.clear()                                     # under the interpreter's lock
    torch.accelerator.memory_allocated()
    torch.accelerator.current_stream().query()
    torch.empty(10).pin_memory()
    torch.empty(10, device=device)
    freed.set()
    torch.accelerator.synchronize()                    # waits for the kernel

thread = threading.Thread(target=free)
thread.start()
slow_double(x, out)
total = out.sum().item()
thread.join()
assert total == 2000.0, total
print("through")
"""
)

_WAIT_MEANWHILE = (
    _KERNEL
    + """
def work():
    assert inside.wait(60)
    side_out = torch.empty(10, device=device)
    event = torch.Event("sim")
    event.record()
    freed.set()
    event.query()
    event.synchronize()
    side_out.fill_(1.0)
    assert side_out.sum().item() == 10.0

thread = threading.Thread(target=work)
thread.start()
slow_double(x, out)
assert out.sum().item() == 2000.0
thread.join()
print("through")
"""
)


def _run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        timeout=_LIMIT_SECONDS,
        check=False,
    )


@pytest.mark.parametrize(
    ("script", "schedule", "check_races"),
    [
        pytest.param(_FREE_MEANWHILE, "late", True, id="free, late"),
        pytest.param(_FREE_MEANWHILE, "eager", False, id="free, eager", marks=pytest.mark.whole),
        pytest.param(_WAIT_MEANWHILE, "late", True, id="wait, late", marks=pytest.mark.whole),
        pytest.param(_WAIT_MEANWHILE, "eager", False, id="wait, eager"),
    ],
)
def test_a_kernel_in_python_runs_while_another_thread_uses_the_device(
    script: str, schedule: str, check_races: bool
) -> None:
    result = _run(script.format(schedule=schedule, check_races=check_races))
    assert result.stdout == "through\n", result.stderr


@pytest.mark.whole
def test_memory_that_queued_work_uses_comes_back_when_there_is_no_other() -> None:
    result = _run(
        """
import torch
from residency import sim
device = sim.enable("64MiB", schedule="late")
side = torch.Stream(device)
for _ in range(200):                                   # far more than fits at once
    source = torch.ones(1 << 20, device=device)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        target = source * 2
    source.record_stream(side)
    del source
side.synchronize()
assert target.sum().item() == 2 << 20
print("through")
"""
    )
    assert result.stdout == "through\n", result.stderr


def test_a_failed_allocation_tells_its_observers_while_another_thread_reads_figures() -> None:
    result = _run(
        """
import sys, threading
import torch
from residency import sim
sim.enable("256MiB", device="cuda", context="0B")
sys.setswitchinterval(1e-5)
told = []
torch._C._cuda_attach_out_of_memory_observer(lambda *figures: told.append(figures))
ended = threading.Event()

def look():
    while not ended.is_set():
        torch.cuda.memory_stats()                      # under the interpreter's lock

thread = threading.Thread(target=look)
thread.start()
for _ in range(500):
    try:
        torch.empty(1 << 30, device="cuda")
    except torch.OutOfMemoryError:
        pass
ended.set()
thread.join()
assert len(told) == 500, len(told)
print("through")
"""
    )
    assert result.stdout == "through\n", result.stderr


def test_an_event_from_before_a_change_of_settings_orders_nothing_after_it() -> None:
    sim.enable("1GiB", schedule="late", check_races=True)
    lane = torch.Stream(device="sim")
    tensor = torch.zeros(100, device="sim")
    for _ in range(5):
        tensor.add_(1)
    old = torch.accelerator.current_stream().record_event()

    sim.enable("1GiB", schedule="late", check_races=True)
    tensor.add_(1)
    lane.wait_event(old)
    assert old.query()
    old.synchronize()
    with pytest.raises(sim.RaceError), lane:
        tensor.add_(1)


def test_times_from_before_and_after_a_change_of_settings_are_not_compared() -> None:
    sim.enable("1GiB", clock=sim.Clock())
    before = torch.accelerator.current_stream().record_event(torch.Event("sim", enable_timing=True))
    sim.enable("1GiB", clock=sim.Clock())
    after = torch.accelerator.current_stream().record_event(torch.Event("sim", enable_timing=True))
    with pytest.raises(RuntimeError, match="record both after"):
        before.elapsed_time(after)
