"""Turns figures into tables, and says of each target of this project whether it is reached."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.checkpoint import loads, saves

Runs = Mapping[str, Sequence[Mapping[str, Any]]]  # by case, one entry a round

_TOLERANCE_SECONDS = 0.02  # "near zero"
_MOST_OF_WRITE_FLOOR = 1.3
_MOST_OF_READ_FLOOR = 1.5
_RING_BYTES = 64 << 20
# Their first figure is all they have: nothing is under way when the call returns.
_NOT_DURABLE = {"torch.save", "safetensors", "torch_checkpointing", "Lightning async"}


def steady(runs: Runs, name: str, key: str) -> list[float]:
    """Returns a figure of all saves but the first of each process."""
    return [save[key] for run in runs.get(name, ()) for save in run["saves"][1:]]


def first(runs: Runs, name: str, key: str) -> list[float]:
    return [run["saves"][0][key] for run in runs.get(name, ())]


def both(values: Sequence[float]) -> str:
    """Returns the least and the median."""
    return f"{min(values):6.3f} /{statistics.median(values):7.3f}" if values else f"{'-':>15}"


def least(values: Sequence[float]) -> float:
    return min(values, default=float("nan"))


def save_table(runs: Runs, memory: Mapping[str, int | None]) -> list[str]:
    lines = [
        "SAVE, seconds from the beginning of the call, min / median",
        f"{'':28}{'first: may go on':>16}   {'call':>15}   {'may go on':>15}   {'wall':>15}"
        "   extra MiB",
    ]
    for name in runs:
        taken = memory.get(name)
        shown = "-" if taken is None else f"{taken / 2**20:.0f}"
        figures = [both(steady(runs, name, key)) for key in ("call", "staged", "wall")]
        mark = "  not fsynced" if name in _NOT_DURABLE else ""
        lines.append(
            f"{name:28}{least(first(runs, name, 'staged')):16.3f}   {'   '.join(figures)}"
            f"   {shown:>9}{mark}"
        )
    return lines


def steps_table(runs: Runs) -> list[str]:
    lines = [
        "TRAINING beside a save: how much longer a step takes while the save runs, and the seconds",
        "that training loses to one save in all (call, staging, slower steps), min / median",
    ]
    for name, rounds in runs.items():
        slow = [each["slowdown"] for run in rounds for each in run["steps"]]
        lost = [each["lost"] for run in rounds for each in run["steps"]]
        lines.append(f"{name:28}{both(slow)} x   {both(lost)} s")
    return lines


def load_table(runs: Runs, memory: Mapping[str, int | None]) -> list[str]:
    lines = [
        "LOAD into tensors that are there, seconds, min / median",
        f"{'':28}{'warm cache':>15}   {'cold cache':>15}   extra MiB       MiB",
    ]
    for name, rounds in runs.items():
        taken = memory.get(name)
        shown = "-" if taken is None else f"{taken / 2**20:.0f}"
        warm, cold = (loaded(runs, name, key) for key in ("warm", "cold"))
        size = rounds[0]["num_bytes"] / 2**20
        lines.append(f"{name:28}{both(warm)}   {both(cold)}   {shown:>9} {size:9.0f}")
    return lines


def loaded(runs: Runs, name: str, key: str) -> list[float]:
    return [seconds for run in runs.get(name, ()) for seconds in run[key]]


def verdicts(save_runs: Runs, step_runs: Runs, load_runs: Runs, load_memory: Any) -> list[str]:
    """Returns a line for each target: what was to be reached, what was, and whether."""
    lines = ["TARGETS, by the least figure of each"]
    lines += _save_verdicts(save_runs)
    if step_runs:
        lines += _step_verdicts(step_runs)
    if load_runs:
        lines += _load_verdicts(load_runs, load_memory)
    return lines


def _verdict(what: str, found: float, most: float, unit: str) -> str:
    word = "reached" if found <= most else "NOT reached"
    return f"{what:64}{found:8.3f}{unit} of {most:6.3f}{unit}   {word}"


def _save_verdicts(runs: Runs) -> list[str]:
    ours, peers = saves.OURS, _peers(runs, saves.OURS)
    lines = []
    for label, seconds in (("first save after prepare", first), ("later saves", steady)):
        found = least(seconds(runs, ours, "staged"))
        best = min(peers, key=lambda name: least(seconds(runs, name, "staged")))
        most = least(seconds(runs, best, "staged"))
        lines.append(_verdict(f"{label}: may go on, beside {best}", found, most, " s"))
    floors = [name for name in saves.FLOORS if name in runs]
    copied = min(least(steady(runs, name, "call")) for name in floors)
    extra = least(steady(runs, ours, "call")) - copied
    lines.append(
        _verdict("call beyond the copies of host tensors", extra, _TOLERANCE_SECONDS, " s")
    )
    raw = min(least(steady(runs, name, "wall")) for name in floors)
    ratio = least(steady(runs, ours, "wall")) / raw
    lines.append(_verdict("durable wall to raw O_DIRECT", ratio, _MOST_OF_WRITE_FLOOR, " x"))
    best = min(peers, key=lambda name: least(steady(runs, name, "wall")))
    ratio = least(steady(runs, ours, "wall")) / least(steady(runs, best, "wall"))
    lines.append(_verdict(f"durable wall to that of {best}", ratio, 1.0, " x"))
    return lines


def _step_verdicts(runs: Runs) -> list[str]:
    lines = []
    peers = _peers(runs, saves.OURS)
    for key, what, unit in (("slowdown", "a step beside a save", " x"), ("lost", "lost", " s")):
        figures = {
            name: least([each[key] for run in rounds for each in run["steps"]])
            for name, rounds in runs.items()
        }
        best = min(peers, key=figures.__getitem__)
        lines.append(_verdict(f"{what}, beside {best}", figures[saves.OURS], figures[best], unit))
    return lines


def _load_verdicts(runs: Runs, memory: Mapping[str, int | None]) -> list[str]:
    lines = []
    for key in ("warm", "cold"):
        raw = min(least(loaded(runs, name, key)) for name in loads.FLOORS if name in runs)
        ratio = least(loaded(runs, loads.OURS, key)) / raw
        lines.append(_verdict(f"load, {key}, to raw preadv", ratio, _MOST_OF_READ_FLOOR, " x"))
    taken = memory.get(loads.OURS)
    if taken is not None:
        ring = _RING_BYTES / 2**20
        lines.append(_verdict("load, extra memory to the ring", taken / 2**20, ring, " MiB"))
    return lines


def _peers(runs: Runs, ours: str) -> list[str]:
    return [name for name in runs if not name.startswith(("floor", ours))]
