"""Probes of the machine and its driver: host memory, the link, disks, threads, forks."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch

from benchmarks.probe.probed import ProbedDevice, milliseconds
from residency import _device, _pinned
from residency._transfer import (
    CopyRun,
    Slab,
    SlabArena,
    available_host_bytes,
    copy_on,
    lanes_of,
    memory_of,
    on_lane,
)
from residency._units import MIB, format_bytes

_NUM_MARKS = 2000
_ASKING = """
import os, torch, residency
{enable}
residency.memory_state()
with residency.phase("step"):
    pass
print("started", torch.get_device_module({type!r}).is_initialized(), flush=True)
child = os.fork()
if child == 0:
    torch.ones(1, device={type!r}).item()
    os._exit(0)
print("child", os.waitpid(child, 0)[1])
"""


def machine(bench: ProbedDevice) -> None:
    """Tells versions, and how much host memory there is: before and after some of it is touched,
    since a virtual machine's may grow as it is used.
    """
    name = getattr(bench.module, "get_device_name", lambda: bench.device.type)()
    bench.info("device", f"{name}, {format_bytes(_device.memory_info()[1])}")
    bench.info("versions", f"torch {torch.__version__}, Python {platform.python_version()}")
    backend = torch.cuda.get_allocator_backend() if bench.device.type == "cuda" else "native"
    settings = _device.allocator_settings()
    bench.info("allocator", f"{backend}, settings {settings!r}")
    before = available_host_bytes()
    touched = torch.ones(bench.pick(8 << 10, 64) * MIB, dtype=torch.uint8)
    after = available_host_bytes()
    for when, found in ((" at first", before), (f", {format_bytes(touched.nbytes)} taken", after)):
        bench.info(f"host memory{when}", "unknown" if found is None else format_bytes(found))


def starts_nothing(bench: ProbedDevice) -> None:
    """Asks for figures in a process that has not used the device: it is to stay able to fork."""
    if not hasattr(bench.module, "is_initialized"):
        return bench.info("figures start nothing", f"{bench.device.type} does not tell")
    enable = f"residency.sim.enable(device={bench.device.type!r})" if _device.is_simulated() else ""
    program = _ASKING.format(enable=enable, type=bench.device.type)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    is_true = done.stdout.split() == ["started", "False", "child", "0"]
    last = done.stderr.strip().splitlines()[-1:]
    return bench.check(
        is_true, "figures start nothing, a child may use it", f"{done.stdout!r} {last}"
    )


def pinned_memory(bench: ProbedDevice) -> None:
    """Takes page-locked memory and gives it back, and writes from it to a disk past the cache."""
    for size in bench.pick((64, 1000, 8000), (64,)):
        slab, _, taken = bench.timed(lambda size=size: Slab(size * MIB))  # type: ignore[misc]
        del slab
        _, _, given = bench.timed(_pinned.release_pinned_cache)
        text = f"made in {milliseconds(taken)}, given back in {milliseconds(given)}"
        bench.info(f"a slab of {size} MiB", text)
    arena = SlabArena()
    region = arena.allocate(4 * MIB)
    home = arena.tensor(region, torch.float32, (MIB,), (1,))
    bench.check(home.is_pinned(), "a part of a slab counts as page-locked")
    _write_directly(bench, region.slab)


def _write_directly(bench: ProbedDevice, slab: Slab) -> None:
    what, flags = "O_DIRECT writes from a slab", os.O_WRONLY | os.O_CREAT
    try:
        file = os.open(bench.folder / "direct", flags | os.O_DIRECT)
    except OSError as error:
        return bench.info(what, f"{bench.folder} has none: {error}")
    try:
        written = os.pwritev(file, [memory_of(slab.data)[:MIB]], 0)
    except OSError as error:
        return bench.check(False, what, str(error))
    finally:
        os.close(file)
    return bench.check(written == MIB, what, format_bytes(written))


def link(bench: ProbedDevice) -> None:
    """Copies in both directions, alone and at once: the host is not to wait for a copy."""
    lanes, count = lanes_of(bench.device), bench.pick(24, 4)
    size = bench.pick(128, 8) * MIB
    slab = Slab(4 * size)
    buffers = [torch.empty(size, dtype=torch.uint8, device=bench.device) for _ in range(4)]

    def up() -> None:
        for i in range(count):
            copy_on(lanes.h2d, [CopyRun(slab, i % 2 * size, 0, size).into(buffers[i % 2])])

    def down() -> None:
        for i in range(count):
            run = CopyRun(slab, (2 + i % 2) * size, 0, size)
            copy_on(lanes.d2h, [run.out_of(buffers[2 + i % 2])])

    lane_of = {up: lanes.h2d, down: lanes.d2h}

    def is_left_running(ways: Sequence[Callable[[], None]]) -> bool:
        for way in ways:
            way()
        ends = [lanes.mark(lane_of[way]) for way in ways]
        return not any(end.query() for end in ends)  # no time tells that, on a busy machine

    for name, ways in (("to the device", [up]), ("to the host", [down]), ("both ways", [up, down])):
        for way in ways:
            way()
        is_left, _, whole = bench.timed(partial(is_left_running, ways))
        rate = len(ways) * count * size / whole / 1e9
        bench.check(is_left, f"copies {name} do not block", f"{rate:.1f} GB/s")
    marks, call, _ = bench.timed(lambda: [lanes.mark(lanes.h2d) for _ in range(_NUM_MARKS)])
    bench.info("an event of a lane", f"{call / len(marks) * 1e6:.2f} us")


def threads(bench: ProbedDevice) -> None:
    """Enters one lane from two threads that have different current streams."""
    lane, other = lanes_of(bench.device).h2d, _device.new_stream(bench.device)
    inside, over = threading.Event(), threading.Event()
    found: list[bool] = []

    def work() -> None:
        torch.accelerator.set_stream(other)
        with on_lane(lane):
            inside.set()
            over.wait()
        found.append(_device.current_stream(bench.device) == other)

    own = _device.current_stream(bench.device)
    thread = threading.Thread(target=work)
    with on_lane(lane):
        thread.start()
        inside.wait()
    found.append(_device.current_stream(bench.device) == own)
    over.set()
    thread.join()
    torch.accelerator.set_stream(own)
    bench.check(all(found), "two threads on one lane keep their streams")
