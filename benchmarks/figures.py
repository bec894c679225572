"""The few figures that a card is judged by, and a table of them beside those of other cards."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator

import torch

from residency import _device, sim

# Source: reports/2026-11-26_h200_h100.md; what was not measured there is not in it.
KNOWN = {
    "H200": {
        "AdamW step over 8 bytes a parameter, streamed": "1.03 x the link",
        "page-locking": "2.8 GB/s, before it was mapped",
        "park": "51.0 GB/s",
        "unpark": "53.1 GB/s",
        "step after a save": "1.7 to 2.3 x a step",
    },
    "H100": {"step after a save": "1.7 to 2.1 x a step"},
}
_LINE = re.compile(r"figure: (?P<name>[^|]+) \| (?P<value>[^|]+) \| (?P<limit>[^|]+)")


def show(name: str, value: str, limit: str) -> None:
    """Prints a figure, as ``table`` finds it again.

    Args:
        name: What was measured, as in ``KNOWN``.
        value: The figure with its unit.
        limit: What the hardware lets one hope for.
    """
    print(f"figure: {name} | {value} | {limit}", flush=True)


def table(output: Iterable[str]) -> Iterator[str]:
    """Yields the rows of a table of the figures in some output; nothing without any."""
    found = [match for line in output if (match := _LINE.fullmatch(line.strip()))]
    if not found:
        return
    yield f"| | this card | limit | {' | '.join(KNOWN)} |"
    yield f"|---|---:|---:|{'---:|' * len(KNOWN)}"
    for match in found:
        others = " | ".join(known.get(match["name"], "-") for known in KNOWN.values())
        yield f"| {match['name']} | {match['value']} | {match['limit']} | {others} |"


def link_rates(device: torch.device) -> tuple[float, float, float]:
    """Returns bytes per second to the device, to the host, and both ways at once, as measured with
    copies of 64 MiB; those of the simulated clock where that is the device.
    """
    if sim.is_enabled():
        rates = sim.Clock().rates()
        return rates[0], rates[1], rates[2]
    size, rounds = 64 << 20, 16
    there = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    here = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    up, down = (_device.new_stream(device) for _ in range(2))

    def load() -> None:
        with up:
            there[0].copy_(here[0], non_blocking=True)

    def store() -> None:
        with down:
            here[1].copy_(there[1], non_blocking=True)

    def both() -> None:
        load()
        store()

    return _rate(load, size, rounds), _rate(store, size, rounds), _rate(both, 2 * size, rounds)


def _rate(copy: Callable[[], None], num_bytes: int, rounds: int) -> float:
    best = 0.0
    for _ in range(3):
        torch.accelerator.synchronize()
        begin = time.perf_counter()
        for _ in range(rounds):
            copy()
        torch.accelerator.synchronize()
        best = max(best, rounds * num_bytes / (time.perf_counter() - begin))
    return best
