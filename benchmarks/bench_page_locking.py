"""Times three ways to page-locked host memory side by side: torch's two, and the library's.

Torch's are ``Tensor.pin_memory()`` and ``torch.empty(pin_memory=True)``; the library's maps large
pages, has several threads touch them, and registers the range. Without CUDA nothing can be
registered: there it is the first touch alone, of small pages by one thread, as the driver does it
for torch, and of large ones by one thread and by all. The best of three rounds counts.
"""

from __future__ import annotations

import argparse
import mmap
import time
from collections.abc import Callable
from unittest import mock

import torch

from benchmarks import figures
from residency import _device, _pinned
from residency._units import format_bytes, parse_bytes

NUM_ROUNDS = 3


def seconds_of(make: Callable[[], object]) -> float:
    """Returns the least seconds that a call takes; what it made is given back after each."""
    times = []
    for _ in range(NUM_ROUNDS):
        begin = time.perf_counter()
        made = make()
        times.append(time.perf_counter() - begin)
        del made
        _pinned.release_pinned_cache()
    return min(times)


def touched(num_bytes: int, *, are_large: bool, num_threads: int) -> torch.Tensor:
    """Maps memory and touches it, without a registration."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE if are_large else mmap.MADV_NOHUGEPAGE)
    data = torch.frombuffer(memory, dtype=torch.uint8)
    with mock.patch.object(_pinned, "_MOST_THREADS", num_threads):
        _pinned._touch(data)
    return data


def main() -> None:
    """Prints the rate of each way, and its ratio to the first."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", default="4GiB")
    num_bytes = parse_bytes(parser.parse_args().size)
    accelerator = _device.accelerator()
    if accelerator is not None and accelerator.type == "cuda":
        torch.zeros(1, device=accelerator)  # the context is no part of it
        on_host = torch.empty(num_bytes, dtype=torch.uint8)
        on_host.fill_(1)
        ways: dict[str, Callable[[], object]] = {
            "torch: Tensor.pin_memory()": on_host.pin_memory,
            "torch: empty(pin_memory=True)": lambda: torch.empty(
                num_bytes, dtype=torch.uint8, pin_memory=True
            ),
            "mapped, touched, registered": lambda: _pinned.allocate_pinned(num_bytes),
        }
    else:
        ways = {
            "touch of small pages, 1 thread": lambda: touched(
                num_bytes, are_large=False, num_threads=1
            ),
            "touch of large pages, 1 thread": lambda: touched(
                num_bytes, are_large=True, num_threads=1
            ),
            "touch of large pages, all": lambda: touched(
                num_bytes, are_large=True, num_threads=_pinned._MOST_THREADS
            ),
        }
    device = "no CUDA" if accelerator is None else accelerator.type
    print(f"{format_bytes(num_bytes)}, {device}, best of {NUM_ROUNDS}")
    first = None
    for name, make in ways.items():
        seconds = seconds_of(make)
        first = first or seconds
        print(f"{name:34} {num_bytes / seconds / 1e9:6.1f} GB/s   {first / seconds:5.2f} x")
    figures.show("page-locking", f"{num_bytes / seconds / 1e9:.1f} GB/s", "18.2 seen on an H200")


if __name__ == "__main__":
    main()
