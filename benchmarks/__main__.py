"""Runs the benchmarks of this folder and writes each one's output to a dated report.

``python -m benchmarks`` runs all; ``python -m benchmarks optimizer_step`` those named, and
``python -m benchmarks checkpoint --size=1GiB`` one with options of its own. A report is
``reports/YYYY-MM-DD_<hardware>_<case>.md`` with the versions and the command that produced it.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent


def main() -> int:
    """Runs the benchmarks that the arguments name, and returns 0 when all of them did."""
    known = sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))
    options = [argument for argument in sys.argv[1:] if argument.startswith("--")]
    wanted = [argument for argument in sys.argv[1:] if argument not in options] or known
    unknown = [name for name in wanted if name not in known]
    if unknown:
        print(f"no benchmark named {', '.join(unknown)}; there are: {', '.join(known)}")
        return 2
    if options and len(wanted) != 1:
        print(f"{' '.join(options)}: name the one benchmark that takes these options")
        return 2
    return max([run(name, options) for name in wanted], default=0)


def run(name: str, options: Sequence[str] = ()) -> int:
    """Runs one benchmark in a process of its own and writes its report when it succeeds."""
    command = [sys.executable, "-m", f"benchmarks.bench_{name}", *options]
    done = subprocess.run(command, cwd=HERE.parent, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, end="")
    if done.returncode:
        print(f"benchmark {name} failed with status {done.returncode}", file=sys.stderr)
        return 1
    path = report_path(name, ".md")
    path.write_text(report(" ".join([name, *options]), done.stdout), encoding="utf-8")
    print(f"written: {path.relative_to(HERE.parent)}")
    return 0


def report_path(name: str, ending: str, hardware: str | None = None) -> Path:
    """Returns where the report of a benchmark goes, or what belongs to it."""
    device = re.sub(r"[^a-z0-9]+", "-", (hardware or hardware_name()).lower()).strip("-")
    return HERE / "reports" / f"{datetime.date.today().isoformat()}_{device}_{name}{ending}"


def report(name: str, output: str) -> str:
    """Returns the text of a report on a benchmark, named with its options."""
    heading = report_heading(name, hardware_name(), f"python -m benchmarks {name}")
    return f"{heading}\n```\n{output.rstrip()}\n```\n"


def report_heading(name: str, hardware: str, command: str) -> str:
    """Returns the first lines of a report: what was measured, where, and how to repeat it."""
    return (
        f"# {name}\n\n"
        f"- hardware: {hardware}, {os.cpu_count()} CPU cores\n"
        f"- torch {torch.__version__}, Python {platform.python_version()}\n"
        f"- command: `{command}`\n"
    )


def hardware_name() -> str:
    """Returns the accelerator's own name, or says that there is none."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return "simulated"
    return str(torch.get_device_module(device).get_device_name())


if __name__ == "__main__":
    sys.exit(main())
