"""Times the host's part of an offloaded step beside the plain foreach step, in one process.

400 small tensors, so that a step is all Python and launches. On the simulated accelerator the
schedule is ``eager`` and copies are those of a few kilobytes: next to free. The two optimizers take
turns, so that a slow moment slows both; the least time of many rounds counts.
"""

from __future__ import annotations

import torch

import residency
from benchmarks.bench_simulator import least_seconds

NUM_TENSORS = 400
NUM_ROUNDS = 60
SHAPE = (16, 16)


def main() -> None:
    """Prints the ratio of the two steps for each class."""
    torch.set_num_threads(1)
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        device = residency.sim.enable("1GiB", schedule="eager")
    print(f"{NUM_TENSORS} tensors of {SHAPE} on {device.type}, least of {NUM_ROUNDS} steps each")
    for cls in (torch.optim.AdamW, torch.optim.SGD):
        options = {"momentum": 0.9} if cls is torch.optim.SGD else {}
        steps = []
        for is_offloaded in (False, True):
            parameters = [torch.nn.Parameter(torch.ones(SHAPE, device=device)) for _ in range(400)]
            optimizer = cls(parameters, lr=1e-3, foreach=True, **options)
            if is_offloaded:
                residency.offload_optimizer(optimizer)
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)

            def step(optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                torch.accelerator.synchronize()

            step()
            steps.append(step)
        plain, offloaded = least_seconds(steps, NUM_ROUNDS, 1)
        print(
            f"{cls.__name__:8} foreach {plain * 1e3:8.2f} ms   offloaded {offloaded * 1e3:8.2f} ms"
            f"   {offloaded / plain:6.2f} x"
        )


if __name__ == "__main__":
    main()
