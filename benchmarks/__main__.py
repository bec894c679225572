"""Runs the benchmarks of this folder and writes each one's output to a dated report.

``python -m benchmarks`` runs all; ``python -m benchmarks optimizer_step`` those named. A report is
``reports/YYYY-MM-DD_<hardware>_<case>.md`` with the versions and the command that produced it.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent


def main() -> int:
    """Runs the benchmarks that the arguments name, and returns 0 when all of them did."""
    known = sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))
    wanted = sys.argv[1:] or known
    unknown = [name for name in wanted if name not in known]
    if unknown:
        print(f"no benchmark named {', '.join(unknown)}; there are: {', '.join(known)}")
        return 2
    return max([run(name) for name in wanted], default=0)


def run(name: str) -> int:
    """Runs one benchmark in a process of its own and writes its report when it succeeds."""
    command = [sys.executable, "-m", f"benchmarks.bench_{name}"]
    done = subprocess.run(command, cwd=HERE.parent, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, end="")
    if done.returncode:
        print(f"benchmark {name} failed with status {done.returncode}", file=sys.stderr)
        return 1
    hardware = re.sub(r"[^a-z0-9]+", "-", hardware_name().lower()).strip("-")
    path = HERE / "reports" / f"{datetime.date.today().isoformat()}_{hardware}_{name}.md"
    path.write_text(report(name, done.stdout), encoding="utf-8")
    print(f"written: {path.relative_to(HERE.parent)}")
    return 0


def report(name: str, output: str) -> str:
    """Returns the text of a report."""
    return (
        f"# {name}\n\n"
        f"- hardware: {hardware_name()}, {os.cpu_count()} CPU cores\n"
        f"- torch {torch.__version__}, Python {platform.python_version()}\n"
        f"- command: `python -m benchmarks {name}`\n\n"
        f"```\n{output.rstrip()}\n```\n"
    )


def hardware_name() -> str:
    """Returns the accelerator's own name, or says that there is none."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return "simulated"
    return str(torch.get_device_module(device).get_device_name())


if __name__ == "__main__":
    sys.exit(main())
