"""Runs one case in this process and prints what it measured as JSON: see ``measure.run_case``.

With ``--gate`` it says when everything is there and waits for a line before it goes on, and again
before it ends: between the two the parent watches the memory of this process and of its children.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoint.loads import LOADERS, MODEL_LOADERS, files_of, make_files
from benchmarks.checkpoint.saves import SAVERS, time_save
from benchmarks.checkpoint.state import State, check_pattern, make_state, put_pattern

_BASE_STEPS = 150
_MOST_STEPS = 20_000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["save", "steps", "make", "load"])
    parser.add_argument("--name", default="")
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--gate", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # peers warn of what their defaults are
    # A parent's pipe has lines of ours alone.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    os.environ["BENCH_FOLDER"] = str(options.folder)
    state = make_state(options.bytes)
    put_pattern(state.flat())
    gate = Gate(out, is_used=options.gate)
    found = {"save": saves, "steps": steps, "make": make, "load": loads}[options.kind](
        options, state, gate
    )
    print(json.dumps(found), file=out)
    sys.stdout.flush()
    out.flush()
    os._exit(0)  # some peers leave threads and processes that would be waited for


class Gate:
    """Lets the parent look at this process at two moments."""

    def __init__(self, out: Any, *, is_used: bool) -> None:
        self._out = out
        self._is_used = is_used

    def pass_(self, word: str) -> None:
        if self._is_used:
            print(word, file=self._out)
            sys.stdin.readline()


def saves(options: argparse.Namespace, state: State, gate: Gate) -> Any:
    """Saves again and again; the first one is not like the others."""
    gate.pass_("begin")
    figures = []
    with SAVERS[options.name](state) as begin:
        for index in range(options.repeat):
            path = options.folder / f"save-{index + 1}"
            figures.append(time_save(begin, path))
            remove(path)
        gate.pass_("end")
    return {"saves": figures, "num_bytes": state.num_bytes}


def steps(options: argparse.Namespace, state: State, gate: Gate) -> Any:
    """Runs a fixed training step alone, then beside a save; the first save is not counted."""
    torch.set_num_threads(1)  # a step that leaves a core, as one on a GPU does
    step = make_step()
    with SAVERS[options.name](state) as begin:
        warm = options.folder / "save-1"
        first = begin(warm)
        first.staged()
        first.done()
        remove(warm)
        figures = []
        for index in range(options.repeat):
            figures.append(steps_beside(begin, step, options.folder / f"save-{index + 2}"))
    return {"steps": figures, "num_bytes": state.num_bytes}


def steps_beside(begin: Any, step: Callable[[], None], path: Path) -> dict[str, float]:
    """Returns how much longer steps took, and the seconds that training lost to one save."""
    for _ in range(20):
        step()
    start = time.perf_counter()
    for _ in range(_BASE_STEPS):
        step()
    base = (time.perf_counter() - start) / _BASE_STEPS
    start = time.perf_counter()
    save = begin(path)
    step()  # forward and backward may go on; the optimizer may not before all is staged
    save.staged()
    staged = time.perf_counter()
    count = 0
    while not save.is_done() and count < _MOST_STEPS:
        step()
        count += 1
    stop = time.perf_counter()
    save.done()
    remove(path)
    beside = (stop - staged) / count if count else base
    lost = stop - start - (count + 1) * base
    return {"slowdown": beside / base, "lost": lost, "base": base, "count": count}


def make_step() -> Callable[[], None]:
    """Makes some milliseconds of one thread's work, part of it Python's own."""
    weight = torch.randn(384, 384)
    value = torch.randn(384, 384)

    def step() -> None:
        current = value
        for _ in range(4):
            current = torch.tanh(current @ weight)
        total = 0
        for number in range(20_000):
            total += number

    return step


def make(options: argparse.Namespace, state: State, gate: Gate) -> Any:
    make_files(options.folder, state)
    return {"num_bytes": state.num_bytes}


def loads(options: argparse.Namespace, state: State, gate: Gate) -> Any:
    """Loads with the files in the page cache, and then without them there."""
    is_whole = options.name in LOADERS
    loader = LOADERS[options.name] if is_whole else MODEL_LOADERS[options.name]
    wanted = state.flat()
    if not is_whole:
        wanted = {name: each for name, each in wanted.items() if name.startswith("model.")}
    put_pattern(state.flat(), salt=7)
    path, load = loader(options.folder, state)
    warm(path)
    gate.pass_("begin")
    figures: dict[str, list[float]] = {"warm": [], "cold": []}
    for kind in ("warm", "cold"):
        for _ in range(options.repeat):
            put_pattern(state.flat(), salt=7)
            warm(path) if kind == "warm" else cool(path)
            start = time.perf_counter()
            load()
            figures[kind].append(time.perf_counter() - start)
            if not options.name.startswith("floor"):
                check_pattern(wanted)
    gate.pass_("end")
    num_bytes = sum(tensor.nbytes for tensor in wanted.values())
    return {**figures, "num_bytes": num_bytes}


def warm(path: Path) -> None:
    buffer = bytearray(1 << 22)
    for each in files_of(path):
        with open(each, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def cool(path: Path) -> None:
    """Drops files from the page cache; what the machine below this one keeps stays."""
    for each in files_of(path):
        fd = os.open(each, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
