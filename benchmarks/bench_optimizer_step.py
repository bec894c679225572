"""Times AdamW's step with its state on the device and streamed from the host, in the same process.

On the simulated accelerator the seconds are those of its clock, not of this machine: they repeat
exactly, and say what one PCIe 5 x16 link and the memory of one H100 would take at full rate.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

import residency
from benchmarks import figures
from benchmarks.device import find_device
from residency._units import format_bytes

NUM_STEPS = 10
# Source: NVIDIA's data sheet of the H100 SXM. The rates of the link are `Clock`'s own.
MEMORY_BYTES_PER_SECOND = 3_350_000_000_000
SIZES = {"simulated": [(256, 1024)] * 16, "real": [(4096, 4096)] * 64}


def main() -> None:
    """Prints one line per setting: median seconds, ratio to stock, bytes that the step adds."""
    clock = residency.sim.Clock(memory_bytes_per_second=MEMORY_BYTES_PER_SECOND)
    device = find_device(clock=clock)
    is_simulated = residency.sim.is_enabled()
    shapes = SIZES["simulated" if is_simulated else "real"]
    bucket = "4MiB" if is_simulated else "128MiB"
    num_parameters = sum(rows * columns for rows, columns in shapes)
    whose = ", simulated clock" if is_simulated else ""
    print(f"AdamW, {num_parameters:,} fp32 parameters, median of {NUM_STEPS} steps{whose}")
    stock_seconds, _ = measure(device, shapes, lambda optimizer: optimizer)
    print(f"{'stock':28} {stock_seconds * 1e3:9.2f} ms   1.00 x")
    for slots in (1, 2, 3):
        seconds, added_bytes = measure(
            device,
            shapes,
            lambda optimizer, slots=slots: residency.offload_optimizer(
                optimizer, bucket=bucket, slots=slots
            ),
        )
        label = f"offloaded, {slots} x {bucket}"
        print(
            f"{label:28} {seconds * 1e3:9.2f} ms {seconds / stock_seconds:6.2f} x   "
            f"the step adds {format_bytes(added_bytes)}"
        )
    moved = 2 * 8 * num_parameters  # both moments, both ways
    limit = moved / figures.link_rates(device)[2]
    figures.show(
        "AdamW step over 8 bytes a parameter, streamed",
        f"{seconds / limit:.2f} x the link",
        f"1.00 ({limit * 1e3:.1f} ms)",
    )


def measure(
    device: torch.device,
    shapes: list[tuple[int, int]],
    prepare: Callable[[torch.optim.Optimizer], torch.optim.Optimizer],
) -> tuple[float, int]:
    """Returns the median seconds of a step, and the most bytes that a warm step adds."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape).to(device)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape).to(device)
    optimizer = prepare(torch.optim.AdamW(parameters))
    for _ in range(2):
        optimizer.step()
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    begin_bytes = torch.accelerator.memory_allocated()
    seconds = []
    now = residency.sim.now_seconds if residency.sim.is_enabled() else time.perf_counter
    for _ in range(NUM_STEPS):
        start = now()
        optimizer.step()
        torch.accelerator.synchronize()
        seconds.append(now() - start)
    added_bytes = torch.accelerator.max_memory_allocated() - begin_bytes
    return statistics.median(seconds), added_bytes


if __name__ == "__main__":
    main()
