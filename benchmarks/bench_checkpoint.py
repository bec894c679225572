"""Times saves and loads of a training state beside those of others and beside the raw disk.

Every case runs in a process of its own, the cases take turns round after round, and memory is
measured in other runs than time. On a machine without an accelerator the state is on the host: what
a device copies beside training is here a copy in the call, which no save can do without; how long
until the caller may go on is what is compared. See ``benchmarks.checkpoint`` for the parts.

    python -m benchmarks checkpoint --size=2GiB --rounds=3 --curve=256MiB,1GiB,4GiB
    python -m benchmarks checkpoint --short         the strongest peers alone
    python -m benchmarks checkpoint --gpu           a real accelerator alone, 16 GiB on it
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.__main__ import report_path
from benchmarks.checkpoint import device, loads, plot, saves, tables
from benchmarks.checkpoint.measure import CaseFailedError, run_case
from benchmarks.device import find_device
from residency._units import format_bytes, parse_bytes
from residency.testing import simulated_device_type

_NUM_SAVES = 3  # of one process: the first is not like the others
_STEP_CASES = (
    saves.OURS,
    "dcp.async thread, stager",
    "dcp.async process, stager",
    "torch_checkpointing",
    "Lightning async",
)
_CURVE_SAVES = (
    saves.OURS,
    "torch.save + fsync",
    "dcp.async thread, stager",
    "torch_checkpointing",
    saves.FLOORS[1],
)
_CURVE_LOADS = (
    loads.OURS,
    "torch.load mmap -> copy_",
    "safetensors load_file",
    "dcp.load",
    loads.FLOORS[1],
)
_SHORT_SAVES = (*_CURVE_SAVES[:-1], *saves.FLOORS)
_SHORT_LOADS = (*_CURVE_LOADS[:3], *loads.FLOORS)
_left_out: dict[str, str] = {}


def main() -> None:
    """Prints the tables, whether each target is reached, and where the plot is."""
    options = _options()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if options.gpu:
        if accelerator is None and simulated_device_type() != "cuda":
            sys.exit("--gpu: there is no accelerator.")
        find_device()
        print("\n".join(device.real_lines(options.size or "16GiB")))
        return
    options.size = options.size or "2GiB"
    num_bytes = parse_bytes(options.size)
    print(f"state: {options.size}, AdamW; {options.rounds} rounds; load average {_load()}")
    with tempfile.TemporaryDirectory(prefix="residency-bench-", dir=options.folder) as name:
        folder = Path(name)
        _check_room(folder, num_bytes)
        short = options.short
        names = list(_SHORT_SAVES if short else saves.SAVERS)
        timed, memory = _saves(names, folder, num_bytes, options.rounds)
        _print(tables.save_table(timed, memory))
        names = [name for name in _STEP_CASES if not short or name in _SHORT_SAVES]
        stepped = _rounds("steps", names, folder, num_bytes, options.rounds, repeat=2)
        _print(tables.steps_table(stepped))
        names = list(_SHORT_LOADS if short else [*loads.LOADERS, *loads.MODEL_LOADERS])
        loaded, loads_memory = _loads(names, folder, num_bytes, options.rounds)
        _print(tables.load_table(loaded, loads_memory))
        _print(tables.verdicts(timed, stepped, loaded, loads_memory))
        if options.curve:
            sizes = [parse_bytes(size) for size in options.curve.split(",")]
            _print([plot.draw(report_path("checkpoint", ".svg"), _curves(folder, sizes))])
    _print(device.simulated_lines() if accelerator is None else device.real_lines())
    _print([f"left out: {name}: {why}" for name, why in _left_out.items()])
    print(f"load average at the end {_load()}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Saves and loads beside others and the raw disk.")
    parser.add_argument("--size", help="of the state; else 2GiB, or 16GiB with --gpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--curve", default="256MiB,1GiB,4GiB", help="sizes to plot, or nothing")
    parser.add_argument("--folder", default=None, help="on the disk to measure")
    parser.add_argument("--short", action="store_true", help="the strongest peers alone")
    parser.add_argument("--gpu", action="store_true", help="a real accelerator alone")
    return parser.parse_args()


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f} of {os.cpu_count()} cores"


def _check_room(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < 8 * num_bytes:
        sys.exit(f"{folder} has {format_bytes(free)}; {format_bytes(8 * num_bytes)} are needed.")


def _print(lines: Sequence[str]) -> None:
    if lines:
        print("\n" + "\n".join(lines), flush=True)


def _rounds(
    kind: str, names: Sequence[str], folder: Path, num_bytes: int, rounds: int, *, repeat: int
) -> dict[str, list[dict[str, Any]]]:
    """Runs every case once a round, so that a slow moment hits all of them."""
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(rounds):
        for name in names:
            run = _run(kind, name=name, num_bytes=num_bytes, folder=folder, repeat=repeat)
            if run is not None:
                found.setdefault(name, []).append(run)
    return found


def _run(kind: str, **arguments: Any) -> dict[str, Any] | None:
    name = arguments["name"]
    if name in _left_out:
        return None
    print(f"{kind} {name}", file=sys.stderr, flush=True)
    try:
        return run_case(kind, **arguments)
    except CaseFailedError as error:
        _left_out[name] = str(error).splitlines()[-1]
        return None


def _memory(
    kind: str, names: Sequence[str], folder: Path, num_bytes: int, *, repeat: int
) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for name in (name for name in names if not name.startswith("floor")):
        run = _run(kind, name=name, num_bytes=num_bytes, folder=folder, repeat=repeat, memory=True)
        found[name] = None if run is None else run["memory"]
    return found


def _saves(names: Sequence[str], folder: Path, num_bytes: int, rounds: int) -> tuple[Any, Any]:
    timed = _rounds("save", names, folder, num_bytes, rounds, repeat=_NUM_SAVES)
    return timed, _memory("save", names, folder, num_bytes, repeat=2)


def _loads(names: Sequence[str], folder: Path, num_bytes: int, rounds: int) -> tuple[Any, Any]:
    with _files(folder, num_bytes) as files:
        timed = _rounds("load", names, files, num_bytes, rounds, repeat=2)
        return timed, _memory("load", names, files, num_bytes, repeat=1)


@contextmanager
def _files(folder: Path, num_bytes: int) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=folder) as name:
        run_case("make", num_bytes=num_bytes, folder=Path(name))
        yield Path(name)


def _curves(folder: Path, sizes: Sequence[int]) -> dict[str, Any]:
    wall, stall, warm = "save: durable wall", "save: until the caller may go on", "load, warm"
    panels: dict[str, dict[str, dict[int, float]]] = {stall: {}, wall: {}, warm: {}}
    for size in sizes:
        timed = _rounds("save", _CURVE_SAVES, folder, size, 1, repeat=_NUM_SAVES)
        for name in timed:
            for title, key in ((stall, "staged"), (wall, "wall")):
                seconds = tables.least(tables.steady(timed, name, key))
                panels[title].setdefault(name, {})[size] = seconds
        with _files(folder, size) as files:
            loaded = _rounds("load", _CURVE_LOADS, files, size, 1, repeat=2)
        for name in loaded:
            seconds = tables.least(tables.loaded(loaded, name, "warm"))
            panels[warm].setdefault(name, {})[size] = seconds
    lines = [
        f"{'COST AGAINST SIZE, seconds':44}" + "".join(f"{format_bytes(s):>12}" for s in sizes)
    ]
    for title, curves in panels.items():
        lines.append(title)
        for name, points in curves.items():
            lines.append(f"  {name:42}" + "".join(f"{points.get(s, 0):12.3f}" for s in sizes))
    _print(lines)
    return panels


if __name__ == "__main__":
    main()
