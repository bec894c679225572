"""Times how fast a module goes to the host and comes back, beside ``.cpu()`` and ``.to(device)``.

The first parking page-locks its memory; the following ones find it. On the simulated accelerator
the seconds are those of its clock, on which the host takes no time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import residency
from benchmarks import figures
from benchmarks.device import find_device, now

NUM_ROUNDS = 5
SIZES = {"simulated": (256, 16), "real": (8192, 16)}  # width and layers: 4 MiB and 4 GiB


def main() -> None:
    """Prints GB/s of each way, the best of some rounds but for the first parking."""
    device = find_device("1GiB", clock=residency.sim.Clock())
    width, depth = SIZES["simulated" if residency.sim.is_enabled() else "real"]
    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(depth)]
    model = torch.nn.Sequential(*layers).to(device)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    first = seconds_of(lambda: residency.park(model))
    residency.unpark(model)
    out, back = [], []
    for _ in range(NUM_ROUNDS):
        out.append(seconds_of(lambda: residency.park(model)))
        back.append(seconds_of(lambda: residency.unpark(model)))
    plain_out = seconds_of(model.cpu)
    plain_back = seconds_of(lambda: model.to(device))
    to_device, to_host, _ = figures.link_rates(device)
    print(f"{num_bytes / (1 << 20):.0f} MiB, {device.type}, GB/s")
    for name, seconds in (
        ("park, the first time", first),
        ("park", min(out)),
        ("unpark", min(back)),
        (".cpu()", plain_out),
        (".to(device)", plain_back),
    ):
        rate = f"{num_bytes / seconds / 1e9:8.1f}" if seconds else "no time"
        print(f"{name:24} {rate:>8}")
    for name, seconds, limit in (("park", min(out), to_host), ("unpark", min(back), to_device)):
        figures.show(name, f"{num_bytes / seconds / 1e9:.1f} GB/s", f"{limit / 1e9:.1f}")


def seconds_of(call: Callable[[], object]) -> float:
    """Returns the seconds that a call takes until the device is done."""
    torch.accelerator.synchronize()
    begin = now()
    call()
    torch.accelerator.synchronize()
    return now() - begin


if __name__ == "__main__":
    main()
