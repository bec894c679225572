"""Times a phase's boundaries beside the two torch calls that each of them makes, in one process.

Three turns, one after the other, so that a slow moment slows all: the two calls alone, a phase that
nobody records, and one that is written to a file. A phase has two boundaries. The least time of
many rounds counts.

Then a training step of a small transformer, as it is and in a recording, which makes three phases
of it (forward, backward, optimizer step) and looks at each call of a module.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

import residency
from benchmarks.bench_simulator import least_seconds
from benchmarks.device import find_device

NUM_CALLS = 50
NUM_ROUNDS = 40
BOUNDARIES = 2
WIDTH, NUM_LAYERS, NUM_TOKENS, BATCH = 256, 12, 64, 8
NUM_STEPS = 8


def main() -> None:
    """Prints the cost of a boundary and its ratio to the calls."""
    torch.set_num_threads(1)
    device = find_device("1GiB", schedule="eager")
    kept = [torch.empty(1000 * i, device=device) for i in range(1, 400)]
    module = torch.get_device_module(device)

    def calls() -> None:
        for _ in range(NUM_CALLS):
            module.memory_stats()
            torch.accelerator.get_memory_info()

    def phases() -> None:
        for _ in range(NUM_CALLS):
            with residency.phase("step"):
                pass

    def recorded() -> None:
        with residency.record(path, calls=False):
            phases()

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        times = least_seconds([calls, phases, recorded], NUM_ROUNDS, 1)
    alone, *others = (seconds / NUM_CALLS for seconds in times)
    print(f"{device.type}, {len(kept)} tensors, least of {NUM_ROUNDS} rounds of {NUM_CALLS}")
    print(f"memory_stats and get_memory_info {alone * 1e6:8.1f} us")
    for name, seconds in zip(("a boundary", "a boundary, recorded"), others, strict=True):
        boundary = seconds / BOUNDARIES
        print(f"{name:32} {boundary * 1e6:8.1f} us   {boundary / alone:6.2f} x")
    del kept
    time_step(device)


def time_step(device: torch.device) -> None:
    """Prints what a recording adds to a training step, and its share."""
    layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, NUM_LAYERS, enable_nested_tensor=False).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randn(BATCH, NUM_TOKENS, WIDTH, device=device)

    def step() -> None:
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.accelerator.synchronize()

    def recorded() -> None:
        with residency.record(path):
            step()

    step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        alone, seconds = least_seconds([step, recorded], NUM_STEPS, 1)
    num_modules = len(list(model.modules()))
    print(f"a training step with {num_modules} modules: {alone * 1e3:.2f} ms, recorded ", end="")
    print(f"{seconds * 1e3:.2f} ms, file and all   {seconds / alone:6.3f} x")


if __name__ == "__main__":
    main()
