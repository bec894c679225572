"""What a hand-off after every training step costs, beside what engines do today.

One loop: a model trains on batches whose length changes, and after each step a fixed number of
bytes has to be free. Four ways to see to that, taking turns in one process, each with a run of its
own: nothing (the step alone), `residency.hand_off`, ``gc.collect(); empty_cache()`` every time, and
verl's ``aggressive_empty_cache`` (the package's own where it is installed, else the same calls:
collect, empty, synchronise, until a pass frees less than 1 GiB, three at the most; verl 0.9.1). The
process has as many objects as a trainer has: a framework is imported.

On the simulated accelerator the milliseconds are the host's: calls, searches and collections. What
a driver's frees and allocations cost shows only on a real one.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

import torch

import residency
from benchmarks.device import find_device
from residency import _device

MIB = 1 << 20
STEPS, WIDTH, LAYERS = 30, 256, 4
WARM_UP = 5
ROUNDS = 2


def aggressive_empty_cache() -> None:
    """Does what verl's function of this name does."""
    for _ in range(3):
        before = torch.accelerator.memory_reserved()
        gc.collect()
        torch.accelerator.empty_cache()
        torch.accelerator.synchronize()
        if before - torch.accelerator.memory_reserved() < 1 << 30:
            break


def find_verl() -> tuple[str, Callable[[], None]]:
    try:
        from verl.utils.memory_utils import aggressive_empty_cache as theirs
    except ImportError:
        return "verl's aggressive_empty_cache (its calls)", aggressive_empty_cache
    return "verl's aggressive_empty_cache", theirs


def collect_and_empty() -> None:
    gc.collect()
    torch.accelerator.empty_cache()


def run(device: torch.device, need: int | None, release: Callable[[], None]) -> dict[str, float]:
    """Trains, and returns what a step and a release took, and how often bytes were short."""
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    steps, releases, short = [], [], 0
    for number in range(STEPS):
        rows = int(2000 + 14000 * torch.rand(1, generator=generator).item() ** 2)
        begun = time.perf_counter()
        model(torch.ones(rows, WIDTH, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        _device.synchronize()
        done = time.perf_counter()
        release()
        if number >= WARM_UP:
            steps.append(done - begun)
            releases.append(time.perf_counter() - done)
            short += need is not None and _device.memory_info(device)[0] < need
    del model, optimizer
    collect_and_empty()
    return {
        "step": 1000 * statistics.median(steps),
        "release": 1000 * statistics.mean(releases),
        "short": short,
    }


def main() -> None:
    try:
        import transformers
        from transformers import Trainer

        framework = f"transformers {transformers.__version__}, {Trainer.__name__}"
    except ImportError:
        framework = "no framework"
    # As CUDA, which is where verl looks for a device.
    device = find_device("2GiB", schedule="eager", workspaces=False, device="cuda")
    run(device, None, lambda: None)
    trained = torch.accelerator.max_memory_allocated()
    # Short steps leave as much free, long ones do not. A context takes its part of the capacity.
    need = _device.memory_info(device)[0] + torch.accelerator.memory_reserved() - trained

    def hand_off() -> None:
        with residency.hand_off(need):
            pass

    name, verl = find_verl()
    ways: dict[str, Callable[[], None]] = {
        "nothing": lambda: None,
        "residency.hand_off": hand_off,
        "gc.collect(); empty_cache()": collect_and_empty,
        name: verl,
    }
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(ROUNDS):  # in turns: the machine is not quiet
        for way, release in ways.items():
            found[way].append(run(device, need, release))
    best = {
        way: {key: min(run[key] for run in runs) for key in runs[0]} for way, runs in found.items()
    }
    ours, alone = best["residency.hand_off"]["release"], best["nothing"]["step"]
    print(f"{len(gc.get_objects())} Python objects ({framework}); {need / MIB:.0f} MiB to be free")
    print(f"{'after each step':44}{'step ms':>9}{'x':>6}{'release ms':>12}{'x':>8}{'short':>7}")
    for way, figures in best.items():
        print(
            f"{way:44}{figures['step']:9.2f}{figures['step'] / alone:6.2f}"
            f"{figures['release']:12.3f}{figures['release'] / ours:8.2f}"
            f"{figures['short']:4.0f}/{STEPS - WARM_UP}"
        )
    print(
        f"least of {ROUNDS} runs; a step is the median of {STEPS - WARM_UP}, a release the mean; "
        "short: after how many steps the bytes were not free"
    )


if __name__ == "__main__":
    main()
