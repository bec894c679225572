"""Times `residency.holders` in processes with more and more objects: the time for each stays.

Half of the objects are dicts and half are lists, ten of which lead to a tensor each. The least time
of three searches counts, less that of a search before the objects were made; beside it stands one
full garbage collection of the same objects.
"""

from __future__ import annotations

import gc
import time

import torch

import residency

COUNTS = (100_000, 200_000, 500_000, 1_000_000, 2_000_000)
NUM_ROUNDS = 3


def seconds_of(call) -> float:
    times = []
    for _ in range(NUM_ROUNDS):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


def main() -> None:
    """Prints a line for each number of objects."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        device = residency.sim.enable("1GiB", schedule="eager")
    torch.empty(1, device=device)
    base_seconds = seconds_of(residency.holders)
    base_collection = seconds_of(gc.collect)
    print(f"{len(gc.get_objects())} objects before: {base_seconds:.2f} s")
    for count in COUNTS:
        junk = [{"a": [index]} for index in range(count // 2)]
        for index in range(0, len(junk), len(junk) // 10):
            junk[index]["tensor"] = torch.empty(1 << 20, dtype=torch.uint8, device=device)
        seconds = seconds_of(residency.holders) - base_seconds
        collection = seconds_of(gc.collect) - base_collection
        found = len(residency.holders())
        print(
            f"{count:9,d} more objects  {seconds:6.2f} s  {seconds / count * 1e6:5.2f} us each  "
            f"{seconds / collection:5.1f} x a garbage collection  ({found} holders)"
        )
        del junk


if __name__ == "__main__":
    main()
