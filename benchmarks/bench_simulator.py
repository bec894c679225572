"""Times the simulated accelerator beside the CPU whose kernels it runs, in the same process.

One stream and no race checker, as in the parts of a program that are not about transfers. The two
devices take turns, so that a slow moment slows both; the least time of many rounds counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch.nn import functional

from residency import sim

NUM_ROUNDS = 40
NUM_CALLS = 100
NUM_STEPS = 40
WIDTH, LENGTH, BATCH, NUM_LAYERS, NUM_HEADS = 128, 64, 4, 2, 4

Operation = Callable[[], object]


def main() -> None:
    """Prints one line per operation, their geometric mean, and a training step."""
    torch.set_num_threads(1)  # two devices that share the cores would disturb each other
    sim.enable("2GiB")
    ratios = []
    with torch.no_grad():
        operations = {device: small_operations(device) for device in ("cpu", "sim")}
        for name in operations["cpu"]:
            pair = [operations[device][name] for device in ("cpu", "sim")]
            cpu_seconds, sim_seconds = least_seconds(pair, NUM_ROUNDS, NUM_CALLS)
            ratios.append(sim_seconds / cpu_seconds)
            print(f"{name:14} {microseconds(cpu_seconds, sim_seconds)}")
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(f"{'geometric mean':14} {mean:47.2f} x\n")
    steps = [training_step(device) for device in ("cpu", "sim")]
    print(f"{'training step':14} {microseconds(*least_seconds(steps, NUM_STEPS, 1))}")


def microseconds(cpu_seconds: float, sim_seconds: float) -> str:
    """Returns both times and their ratio as text."""
    return (
        f"cpu {cpu_seconds * 1e6:10.2f} us   sim {sim_seconds * 1e6:10.2f} us   "
        f"{sim_seconds / cpu_seconds:10.2f} x"
    )


def small_operations(device: str) -> dict[str, Operation]:
    """Returns operations that are small enough to be all overhead."""
    a, b = (torch.randn(16, 16).to(device) for _ in range(2))
    weight = torch.ones(16).to(device)
    return {
        "add": lambda: a + b,
        "mul_": lambda: a.mul_(1.0),
        "mm": lambda: a @ b,
        "sum": lambda: a.sum(),
        "relu": lambda: torch.relu(a),
        "softmax": lambda: torch.softmax(a, -1),
        "layer_norm": lambda: functional.layer_norm(a, (16,), weight, weight),
        "cat": lambda: torch.cat([a, b]),
        "empty": lambda: torch.empty(16, 16, device=device),
        "view": lambda: a.view(-1),
    }


def training_step(device: str) -> Operation:
    """Returns a step of a small transformer: forward, backward, AdamW."""
    torch.manual_seed(0)
    layers = [
        torch.nn.TransformerEncoderLayer(
            WIDTH, NUM_HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        for _ in range(NUM_LAYERS)
    ]
    model = torch.nn.Sequential(
        torch.nn.Embedding(256, WIDTH), *layers, torch.nn.Linear(WIDTH, 256)
    )
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    tokens = torch.randint(0, 256, (BATCH, LENGTH)).to(device)

    def step() -> None:
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def least_seconds(
    operations: list[Operation],
    num_rounds: int,
    num_calls: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Returns for each operation the least seconds of a call, taking turns in every round."""
    least = [math.inf] * len(operations)
    for _ in range(num_rounds):
        for index, operation in enumerate(operations):
            start = clock()
            for _ in range(num_calls):
                operation()
            least[index] = min(least[index], (clock() - start) / num_calls)
    return least


if __name__ == "__main__":
    main()
