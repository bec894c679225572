"""Runs other projects' own code on the simulated accelerator in CUDA's place, stock beside ours.

``python -m benchmarks.projects /path/to/xtuner /path/to/prime-rl /path/to/torchtitan`` takes
folders of sources, of any of these projects, and recognises each by its files. Nothing is written
into them. Each run is a process of its own. The report, where all runs ended, is
``reports/YYYY-MM-DD_simulated_projects.md``, with the names of the projects where it is not all.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.__main__ import report_heading, report_path
from benchmarks.projects.rows import merged, table
from benchmarks.projects.sources import PROJECTS, Project, recognise, said_of

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 1800  # seconds for one run, on a machine that has other work
_NUM_LAST_LINES = 25


def main(folders: Sequence[str]) -> int:
    """Runs what is in the folders, and returns 0 when every run ended."""
    found = {Path(folder): recognise(Path(folder)) for folder in folders}
    unknown = [str(folder) for folder, name in found.items() if name is None]
    names = [name for name in found.values() if name is not None]
    if unknown or not names or len(set(names)) != len(names):
        known = ", ".join(f"{name} ({project.package})" for name, project in PROJECTS.items())
        wrong = f"{', '.join(unknown)}: no source of a project that is known" if unknown else ""
        print(wrong or 'give one folder for each project: PROJECTS="/path/to/xtuner ..."')
        print(f"there are: {known}")
        return 2
    sections, has_failed = [], False
    for folder, name in found.items():
        assert name is not None
        lines, is_whole = run_project(name, folder.resolve())
        print("\n".join(lines), end="\n\n", flush=True)
        sections.append("\n".join(lines))
        has_failed = has_failed or not is_whole
    if has_failed:
        print("a run failed, so no report is written", file=sys.stderr)
        return 1
    parts = [] if len(names) == len(PROJECTS) else sorted(names)
    path = report_path("_".join(["projects", *parts]).lower(), ".md", "simulated")
    heading = report_heading("projects", "simulated", "make test-projects PROJECTS=...")
    path.write_text(heading + "\n" + "\n\n".join(sections) + "\n", encoding="utf-8")
    print(f"written: {path.relative_to(ROOT)}")
    return 0


def run_project(name: str, source: Path) -> tuple[list[str], bool]:
    """Runs one project's kinds, and returns its section of the report and whether all ended."""
    project = PROJECTS[name]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="residency-projects-") as given:
        for kind in project.titles:
            runs = [(), *((more,) for more, kinds in project.more if kind in kinds)]
            parts = [
                part for more in runs for part in _run(project, source, kind, Path(given), more)
            ]
            results[kind] = merged(part for part in parts if part) if all(parts) else None
    columns = [column for column in results.values() if column]
    used = sorted({each for column in columns for each in column["stand-ins"]})
    changed = sorted({each for column in columns for each in column.get("changed", ())})
    lines = [
        f"## {name}",
        "",
        f"- source: {said_of(name, source)}",
        f"- stand-ins for: {', '.join(used) or 'nothing'}",
        *(f"- without effect: {each}" for each in changed),
        "",
        *table(project.titles, results),
    ]
    return lines, all(results.values())


def _run(
    project: Project, source: Path, kind: str, folder: Path, more: tuple[str, ...]
) -> list[dict[str, Any] | None]:
    """Runs one kind, and returns what its processes wrote; None for one that failed."""
    if more and more[0].startswith("ranks"):
        what = more[0].split("-")[1:]  # as of "ranks-resume"
        named = {"-".join([f"{kind}-rank{rank}", *what]): [*what, str(rank)] for rank in range(2)}
    else:
        named = {"-".join([kind, *more]): list(more)}
    begun, port = time.monotonic(), _free_port()
    started = {
        name: _start(project, source, [kind, str(folder), *arguments], folder / f"{name}.log", port)
        for name, arguments in named.items()
    }
    results: list[dict[str, Any] | None] = []
    for name, process in started.items():
        status = _end_of(process, begun + LIMIT)
        seconds = time.monotonic() - begun
        print(f"{project.driver} {name}: status {status}, {seconds:.0f} s", file=sys.stderr)
        result = folder / f"{name}.json"
        if status or not result.exists():
            log = (folder / f"{name}.log").read_text(errors="replace")
            print("\n".join(log.splitlines()[-_NUM_LAST_LINES:]), file=sys.stderr)
            results.append(None)
        else:
            results.append(json.loads(result.read_text()))
    return results


def _free_port() -> int:
    """Returns a port at which the ranks of one run may meet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        found: int = free.getsockname()[1]
        return found


def _start(
    project: Project, source: Path, arguments: Sequence[str], log: Path, port: int
) -> subprocess.Popen[bytes]:
    roots = [ROOT, ROOT / "src", ROOT / "sim" / "src", *(source / root for root in project.roots)]
    path = os.pathsep.join([*map(str, roots), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": path,
        "PYTHONDONTWRITEBYTECODE": "1",  # the folder is another's
        "PROJECT": str(source),
        "MASTER_PORT": str(port),
        "WANDB_MODE": "disabled",
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.projects.{project.driver}", *arguments],
            cwd=log.parent,
            env={**os.environ, **environment},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that what it starts ends with it
        )


def _end_of(process: subprocess.Popen[bytes], deadline: float) -> int:
    try:
        return process.wait(timeout=max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
