"""One command for a machine with a GPU: probes, tests, benchmarks, recordings and the demo, and one
report.

``python -m benchmarks.gpu`` does all; ``python -m benchmarks.gpu probe optimizers`` the parts that
are named, so that each fits where time is short. ``tests`` are all parts of tests, ``figures`` the
rest but ``atlas``: each of the two is over in six minutes, with what it has by then. A command at
the end of its time is interrupted, and shows what it has. Each is a process of its own: an error
that stays with a CUDA context ends with it. The report is
``reports/YYYY-MM-DD_<hardware>_gpu[_parts].md``, written anew after each command.

``RESIDENCY_TEST_DEVICE=sim-as-cuda`` takes the simulated accelerator in CUDA's place, with the
sizes of a processor.
"""

from __future__ import annotations

import importlib.util
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks import figures
from benchmarks.__main__ import HERE, report_heading, report_path
from residency.testing import simulated_device_type

_IS_SIMULATED = simulated_device_type() == "cuda"
_PYTEST = (
    "-m", "pytest", "-q", "--tb=short", "-rfE", "--timeout=300", "--maxfail=100",
    "--continue-on-collection-errors", "-p", "no:cacheprovider", "-p", "no:benchmark",
    # Torch says it once, in whichever test the first product is in a thread of autograd's.
    "-W", "ignore:Attempting to run cuBLAS",
)  # fmt: skip
# Tests of what is no accelerator's, of packages that a GPU machine may lack, and of the simulator,
# which must not be compiled in the process that uses CUDA, stand in no part.
_TESTS = {
    "optimizers": ("tests/transfer", "tests/optim", "--ignore=tests/optim/test_third_party.py",
                   "--ignore=tests/optim/stacks"),
    "saves": ("tests/checkpoint", "tests/test_callers_modes.py"),
    "memory": ("tests/memory", "tests/park", "tests/handoff", "tests/test_no_cycles.py",
               "tests/testing/test_real_device.py"),
    "stacks": ("tests/optim/stacks", "tests/integrations",
               "--ignore=tests/integrations/test_xtuner.py",
               "--ignore=tests/integrations/test_verl_door.py"),
}  # fmt: skip
_BENCHMARKS = (
    "page_locking",
    "training_with_saves",
    "optimizer_step",
    "park",
    "optimizer_overhead",
    "phase_boundary",
    "hand_off",
)
_SAVE = (
    "-m",
    "benchmarks.bench_checkpoint",
    "--gpu",
    "--size",
    "64MiB" if _IS_SIMULATED else "4GiB",
)
# Each case of the demo, and the package that it cannot do without.
_DEMO = {
    "resume": None,
    "optimizer-step": None,
    "hand-off": None,
    "async-save": "lightning",
    "best-adapter": "peft",
    "evaluation": "transformers",
}
_PARTS = ("benchmarks", "probe", *_TESTS, "record", "demo", "atlas")
_GROUPS = {"tests": tuple(_TESTS), "figures": ("benchmarks", "probe", "record", "demo")}
# Its rows are on disk as they come; those of convolutions that are refused a workspace, each of
# which starts two processes, come last.
_ATLAS = (("attention", "shapes", "known", "convolutions"), ("opinfo",), ("refused",))
_ATLAS_OF_A_PROCESSOR = (("opinfo:0/300",),)
_SECONDS_OF_A_GROUP = 330  # leaves half a minute of six minutes for the last command to end
_MOST_SECONDS = 120  # of its commands; the tests beside one another took 90 on an H200
_MOST_SECONDS_OF_A_PART = 1800  # that was asked for by its own name
_SECONDS_TO_END = 20  # once it was interrupted
_MOST_WORKERS = 12
_NEEDED = {"rich": "rich"}
_NEEDED_BY_TESTS = {
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
    "hypothesis": "hypothesis",
    "sortedcontainers": "sortedcontainers",
    "numpy": "numpy",
    "safetensors": "safetensors",
}


@dataclass(frozen=True, slots=True)
class _Done:
    """Is a command that has run."""

    command: Sequence[str]
    status: int
    seconds: float
    output: str

    def section(self) -> str:
        """Returns its part of the report."""
        lines = self.output.rstrip().splitlines()
        if "pytest" in self.command:  # what failed, and the counts
            starts = [i for i, line in enumerate(lines) if "short test summary info" in line]
            lines = lines[starts[-1] :] if starts else lines[-1:]
        text = "\n".join(lines)
        command = " ".join(("python", *self.command))
        return f"## `{command}`\n\nstatus {self.status}, {self.seconds:.0f} s\n\n```\n{text}\n```\n"


def main(names: Sequence[str]) -> int:
    """Runs the parts and writes the report; returns 0 when every command did what it should."""
    if unknown := sorted(set(names) - {*_PARTS, *_GROUPS}):
        known = ", ".join((*_PARTS, *_GROUPS))
        print(f"no part is named {', '.join(unknown)}; there are: {known}")
        return 2
    parts = [part for name in names or _PARTS for part in _GROUPS.get(name, (name,))]
    needed = _NEEDED | (_NEEDED_BY_TESTS if set(parts) & set(_TESTS) else {})
    if missing := [package for module, package in needed.items() if not _is_installed(module)]:
        print(f"missing: {' '.join(missing)}. pip install them into {sys.executable}.")
        return 2
    hardware = _hardware()
    if hardware == "simulated" and not _IS_SIMULATED:
        print("torch finds no accelerator; RESIDENCY_TEST_DEVICE=sim-as-cuda takes the simulated.")
        return 2
    path = report_path("_".join(["gpu", *names]), ".md", hardware)
    report, is_kept = report_heading("gpu", hardware, f"make gpu PARTS='{' '.join(parts)}'"), True
    output: list[str] = []
    is_short = bool(set(names) & set(_GROUPS))
    end = time.perf_counter() + (_SECONDS_OF_A_GROUP if is_short else math.inf)
    most_seconds = _MOST_SECONDS if is_short else _MOST_SECONDS_OF_A_PART
    for command in [command for part in parts for command in _commands(part)]:
        done = _run(command, min(most_seconds, end - time.perf_counter()))
        is_kept = is_kept and done.status == 0
        report += f"\n{done.section()}"
        output += done.output.splitlines()
        rows = "\n".join(figures.table(output))
        path.write_text(report + f"\n## Beside other cards\n\n{rows}\n" * bool(rows), "utf-8")
    if left_out := [f"{case} (no {name})" for case, name in _DEMO.items() if not _can_show(case)]:
        print(f"left out of the demo: {', '.join(left_out)}")
    if "record" in parts and not _is_installed("transformers"):
        print("left out: record (no transformers)")
    print(f"written: {path}; {'kept' if is_kept else 'NOT ALL IS KEPT'}")
    return 0 if is_kept else 1


def _commands(part: str) -> Iterable[Sequence[str]]:
    """Yields what a part runs, as arguments of Python."""
    if part == "probe":
        yield ("-m", "benchmarks.probe", *["--small"] * _IS_SIMULATED)
    elif part == "benchmarks":
        yield from (("-m", f"benchmarks.bench_{name}") for name in _BENCHMARKS)
        yield _SAVE
    elif part == "record":
        if _is_installed("transformers"):
            folder = str(report_path("allocations", "", _hardware()))
            small = ["--small"] * _IS_SIMULATED
            yield ("-m", "benchmarks.record_allocations", folder, *small)
    elif part == "atlas":
        for names in _ATLAS_OF_A_PROCESSOR if _IS_SIMULATED else _ATLAS:
            path = report_path(f"atlas_{names[-1].partition(':')[0]}", ".jsonl", _hardware())
            yield ("-m", "benchmarks.atlas", "rows", *names, "--to", str(path))
    elif part == "demo":
        yield from (
            ("-m", "residency", "demo", "--case", case) for case in _DEMO if _can_show(case)
        )
    elif _is_installed("xdist"):
        workers = max(1, min(_MOST_WORKERS, (os.cpu_count() or 1) - 2))
        beside = "(whole or not whole) and not alone"
        yield (*_PYTEST, "-m", beside, "-n", str(workers), "--dist", "loadfile", *_TESTS[part])
        yield (*_PYTEST, "-m", "alone", *_TESTS[part])  # they look at what all have on the card
    else:
        yield (*_PYTEST, "-m", "whole or not whole", *_TESTS[part])


def _can_show(case: str) -> bool:
    package = _DEMO[case]
    return package is None or _is_installed(package)


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _hardware() -> str:
    """Returns the accelerator's name, asked in another process: this one is to have no context."""
    program = "from benchmarks.__main__ import hardware_name; print(hardware_name())"
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True).stdout.strip()


def _run(command: Sequence[str], most_seconds: float) -> _Done:
    """Runs a command to its end, or that of its time, and shows what it prints while it does."""
    if most_seconds <= 0:
        return _Done(command, 1, 0, "not run: there was no time left\n")
    print(f"\n== python {' '.join(command)}", flush=True)
    start, lines = time.perf_counter(), []
    sources = (str(HERE.parent / "src"), str(HERE.parent / "sim" / "src"))
    paths = (*sources, os.environ.get("PYTHONPATH"))
    environment = {
        "RESIDENCY_TEST_DEVICE": "cuda",
        "PYTHONUNBUFFERED": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    with subprocess.Popen(
        [sys.executable, *command],
        cwd=HERE.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        ends = [
            threading.Timer(most_seconds, process.send_signal, [signal.SIGINT]),
            threading.Timer(most_seconds + _SECONDS_TO_END, process.kill),
        ]
        for end in ends:
            end.start()
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line)
        finally:
            for end in ends:
                end.cancel()
    seconds = time.perf_counter() - start
    if seconds >= most_seconds:
        lines.append(f"\ncut off after {most_seconds:.0f} s\n")
    return _Done(command, process.returncode, seconds, "".join(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
