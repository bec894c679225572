"""Times the host's part of an offloaded step beside the plain foreach step, in one process.

400 small tensors, so that a step is all Python and launches. On the simulated accelerator the
schedule is ``eager`` and copies are those of a few kilobytes: next to free. The two optimizers take
turns, so that a slow moment slows both; the least processor time of many rounds counts, to which
what else the machine does adds little.

The plain step is timed again after a snapshot of the optimizer that is over, beside its time right
before: nothing of the snapshot is to be left.
"""

from __future__ import annotations

from collections.abc import Callable
from time import process_time

import torch

import residency
from benchmarks.bench_simulator import least_seconds
from benchmarks.device import find_device

NUM_TENSORS = 400
NUM_ROUNDS = 60
SHAPE = (16, 16)


def main() -> None:
    """Prints the ratio of the two steps for each class."""
    torch.set_num_threads(1)
    device = find_device("1GiB", schedule="eager")
    print(f"{NUM_TENSORS} tensors of {SHAPE} on {device.type}")
    print(f"least processor time of {NUM_ROUNDS} steps each")
    for cls in (torch.optim.AdamW, torch.optim.SGD):
        options = {"momentum": 0.9} if cls is torch.optim.SGD else {}
        plain, offloaded = (
            cls(_parameters(device), lr=1e-3, foreach=True, **options) for _ in range(2)
        )
        residency.offload_optimizer(offloaded)
        steps = [_first_step(optimizer) for optimizer in (plain, offloaded)]
        of_plain, of_offloaded = least_seconds(steps, NUM_ROUNDS, 1, clock=process_time)
        (before,) = least_seconds(steps[:1], NUM_ROUNDS, 1, clock=process_time)
        residency.snapshot(plain).wait()
        (after,) = least_seconds(steps[:1], NUM_ROUNDS, 1, clock=process_time)
        print(
            f"{cls.__name__:8} foreach {of_plain * 1e3:8.2f} ms"
            f"   offloaded {of_offloaded * 1e3:8.2f} ms   {of_offloaded / of_plain:6.2f} x"
            f"   foreach after a snapshot {after * 1e3:8.2f} ms   {after / before:6.2f} x"
        )


def _parameters(device: torch.device) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.ones(SHAPE, device=device)) for _ in range(NUM_TENSORS)]
    for parameter in made:
        parameter.grad = torch.ones_like(parameter)
    return made


def _first_step(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        optimizer.step()
        torch.accelerator.synchronize()

    step()
    return step


if __name__ == "__main__":
    main()
