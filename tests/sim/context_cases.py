"""How the cases of tests/sim/test_contexts.py run: each in a child forked from one process that has
not used CUDA, in whose place the simulator is. A context, once made, is for good.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from residency import sim

MIB = 1 << 20
CAPACITY = 1024 * MIB
CONTEXT = 534 * MIB  # what it is as CUDA, unless the program says otherwise

Case = Callable[[], None]
cases: dict[str, Case] = {}


def cases_of(num_devices: int) -> Callable[[Case], Case]:
    """Returns what adds a case for a process that sees a number of devices."""

    def add(function: Case) -> Case:
        def run() -> None:
            options = {"schedule": "late", "check_races": True, "device": "cuda"}
            sim.enable(CAPACITY, devices=num_devices, **options)
            function()

        cases[function.__name__] = run
        return function

    return add


def in_child(function: Case) -> str:
    """Returns ``passed``, or the traceback, of a call in a forked process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            function()
            outcome = "passed"
        except BaseException:
            outcome = traceback.format_exc()
        os.write(writer, outcome.encode()[:60_000])
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        outcome = pipe.read().decode()
    assert os.waitpid(child, 0)[1] == 0, "the child was killed"
    return outcome


def has_context(index: int = 0) -> bool:
    return torch._C._cuda_hasPrimaryContext(index)


def use() -> None:
    assert torch.ones(2, device="cuda").sum().item() == 2


def starts_nothing(ask: Callable[[], object]) -> None:
    """Checks that a process has no context after a call, and may fork."""
    ask()
    assert not torch.cuda.is_initialized()
    assert not has_context()
    assert in_child(use) == "passed"


def run_all() -> None:
    """Runs every case, and writes what came of it into the folder that the caller named."""
    outcomes = {name: in_child(run) for name, run in cases.items()}
    (Path(sys.argv[1]) / "outcomes.json").write_text(json.dumps(outcomes))
